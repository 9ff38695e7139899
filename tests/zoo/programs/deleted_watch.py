"""inotify on a file that was deleted while it is open."""

import os

from common import called, libc, run

os.makedirs("/srv/zoo", exist_ok=True)
file = os.open("/srv/zoo/watched-and-gone", os.O_RDWR | os.O_CREAT)
watch = called(libc.inotify_init1(os.O_NONBLOCK), "inotify_init1")
called(libc.inotify_add_watch(watch, b"/srv/zoo/watched-and-gone", 2), "inotify_add_watch")
os.unlink("/srv/zoo/watched-and-gone")


def check(n: int) -> None:
    os.write(file, b"x")
    assert os.read(watch, 4096)


run(check)
