"""A worker of user 1000: writes files of its own, forks, uses /dev/shm; nothing of it becomes root's."""

import os

from common import run

assert os.getuid() == 1000, os.getuid()
me = os.getresuid(), os.getresgid(), os.getgroups()
os.makedirs("/tmp/zoo-user", exist_ok=True)
file = open("/tmp/zoo-user/file", "w+")
shared = open("/dev/shm/zoo-user", "w+")
gone = open("/tmp/zoo-user/gone", "w+")
os.unlink("/tmp/zoo-user/gone")


def check(n: int) -> None:
    assert (os.getresuid(), os.getresgid(), os.getgroups()) == me, "another user"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if os.getuid() == 1000 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    for each in (file, shared, gone):
        each.write(f"{n}\n")
        each.flush()
        each.seek(0)
        assert len(each.read().split()) == n
        assert os.fstat(each.fileno()).st_uid == 1000, "a file belongs to somebody else"
    try:
        open("/etc/zoo-must-not", "w")
    except PermissionError:
        return
    raise AssertionError("it may write where only root may")


run(check)
