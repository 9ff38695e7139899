"""A volume's file that is open by a name which was deleted while another one stays."""

import os

from common import run

linked = os.open("/gate/one", os.O_RDWR | os.O_CREAT)
os.link("/gate/one", "/gate/two")
os.unlink("/gate/one")


def check(n: int) -> None:
    os.pwrite(linked, b"%5d" % n, 0)
    assert open("/gate/two", "rb").read() == b"%5d" % n


run(check)
