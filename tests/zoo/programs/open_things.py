"""Files of every kind held open: /proc, /sys, directories, O_PATH, O_TMPFILE, deleted files, a deleted working directory."""

import fcntl
import os
import signal

from common import run

os.makedirs("/srv/zoo/open/deep", exist_ok=True)
named = {}
for path in (
    "/proc/self/status",
    "/proc/meminfo",
    "/proc/1/stat",
    "/proc/sys/kernel/pid_max",
    "/sys/kernel/mm/transparent_hugepage/enabled",
):
    named[path] = os.open(path, os.O_RDONLY)
folder = os.open("/srv/zoo/open", os.O_RDONLY | os.O_DIRECTORY)
handle = os.open("/srv/zoo/open/deep", os.O_PATH)
unnamed = os.open("/srv/zoo/open", os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(unnamed, b"unnamed")
appended = os.open("/srv/zoo/open/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
gone = []
for i in range(40):
    gone.append(os.open(f"/srv/zoo/open/gone-{i}", os.O_RDWR | os.O_CREAT))
    os.write(gone[i], b"gone %d" % i)
    os.unlink(f"/srv/zoo/open/gone-{i}")
os.makedirs("/srv/zoo/open/left")
child = os.fork()
ask_read, ask_write = os.pipe()
if child == 0:
    os.chdir("/srv/zoo/open/left")
    while True:
        signal.pause()
while os.readlink(f"/proc/{child}/cwd") != "/srv/zoo/open/left":
    pass
os.rmdir("/srv/zoo/open/left")
link = os.open("/srv/zoo/open/renamed", os.O_RDWR | os.O_CREAT)
os.rename("/srv/zoo/open/renamed", "/srv/zoo/open/renamed-again")
null, zero, random = (os.open(f"/dev/{x}", os.O_RDWR) for x in ("null", "zero", "urandom"))
duplicate = os.dup(appended)
fcntl.fcntl(duplicate, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def check(n: int) -> None:
    for path, fd in named.items():
        assert os.pread(fd, 4096, 0), path
    os.close(os.open(f"new-{n}", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    assert "log" in os.listdir(folder)
    assert os.readlink(f"/proc/self/fd/{handle}") == "/srv/zoo/open/deep"
    assert os.pread(unnamed, 10, 0) == b"unnamed", "a file that never had a name"
    for i, fd in enumerate(gone):
        assert os.pread(fd, 10, 0) == b"gone %d" % i, f"a deleted file's content: {i}"
        assert os.fstat(fd).st_nlink == 0, "a deleted file has a name again"
    os.write(appended if n % 2 else duplicate, b"x")
    assert os.path.getsize("/srv/zoo/open/log") == n
    assert fcntl.fcntl(duplicate, fcntl.F_GETFD) == fcntl.FD_CLOEXEC
    assert fcntl.fcntl(appended, fcntl.F_GETFD) in (0, fcntl.FD_CLOEXEC)
    assert os.readlink(f"/proc/{child}/cwd").endswith("left (deleted)"), os.readlink(f"/proc/{child}/cwd")
    os.pwrite(link, b"%5d" % n, 0)
    assert open("/srv/zoo/open/renamed-again", "rb").read() == b"%5d" % n
    assert os.read(zero, 3) == bytes(3)
    assert len(os.read(random, 3)) == 3
    left = [x for x in os.listdir("/srv/zoo/open") if "link_remap" in x or "cr." in x or x.startswith("gone")]
    assert not left, f"left behind: {left}"


run(check)
os.kill(child, 9)
