"""inotify on a file and a directory of the layer and of /dev/shm: every change is told after a move, too."""

import array
import fcntl
import os
import termios

from common import called, libc, run, say

IN_MODIFY, IN_CREATE = 2, 0x100
places = {}
for folder in ("/srv/zoo", "/dev/shm"):
    os.makedirs(f"{folder}/watched", exist_ok=True)
    open(f"{folder}/watched-file", "w").close()
    for path, mask in ((f"{folder}/watched", IN_CREATE), (f"{folder}/watched-file", IN_MODIFY)):
        fd = called(libc.inotify_init1(os.O_NONBLOCK), "inotify_init1")
        called(libc.inotify_add_watch(fd, path.encode(), mask), "inotify_add_watch")
        places[path] = fd

unread = called(libc.inotify_init1(os.O_NONBLOCK), "inotify_init1")
called(libc.inotify_add_watch(unread, b"/srv/zoo/watched", IN_CREATE), "inotify_add_watch")
waiting = 0


def check_unread() -> None:
    """Events that nobody reads pile up, unless a move drops them."""
    global waiting
    size = array.array("i", [0])
    fcntl.ioctl(unread, termios.FIONREAD, size)
    if size[0] < waiting:
        say("forgotten: unread inotify events")
    waiting = size[0]


def check(n: int) -> None:
    for path, fd in places.items():
        if os.path.isdir(path):
            open(f"{path}/{n}", "w").close()
        else:
            with open(path, "a") as file:
                file.write("x")
        try:
            assert len(os.read(fd, 4096)) >= 16
        except BlockingIOError:
            raise AssertionError(f"a change of {path} was not told") from None
    check_unread()


run(check)
