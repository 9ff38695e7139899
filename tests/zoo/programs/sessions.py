"""Sessions, process groups, an orphaned process group, a daemon by double fork, zombies: all keep their ids and parents."""

import os
import signal
import sys
import time

from common import run


def ids(pid: int) -> tuple[int, int, int, str]:
    text = open(f"/proc/{pid}/stat").read()
    state, parent, group, session = text.rpartition(")")[2].split()[:4]
    return int(parent), int(group), int(session), "Z" if state == "Z" else "alive"


def child(what) -> int:
    pid = os.fork()
    if pid == 0:
        what()
        os._exit(0)
    return pid


def sleep() -> None:
    while True:
        time.sleep(1)


read, write = os.pipe()


def daemon() -> None:
    os.setsid()
    pid = child(sleep)
    os.write(write, str(pid).encode())


child(daemon)
daemon_pid = int(os.read(read, 20))
os.wait()


def leader() -> None:
    os.setpgid(0, 0)
    member = child(sleep)
    os.write(write, str(member).encode())


child(leader)
member_pid = int(os.read(read, 20))
os.wait()


def session() -> None:
    os.setsid()
    child(sleep)
    inner = child(lambda: (os.setpgid(0, 0), sleep()))
    os.write(write, str(inner).encode())
    sleep()


session_pid = child(session)
inner_pid = int(os.read(read, 20))
zombies = [child(lambda: None) for _ in range(5)]
killed = child(sleep)
os.kill(killed, signal.SIGKILL)
time.sleep(0.2)
everyone = [os.getpid(), daemon_pid, member_pid, session_pid, inner_pid, *zombies, killed]
before = {pid: ids(pid) for pid in everyone}
assert before[daemon_pid][0] == 1, "the daemon's parent is not pid 1"
assert [before[z][3] for z in zombies] == ["Z"] * 5


def check(n: int) -> None:
    now = {pid: ids(pid) for pid in everyone}
    assert now == before, f"{before} has become {now}"


run(check)
for zombie in zombies:
    assert os.waitpid(zombie, 0) == (zombie, 0), "a zombie's exit status"
assert os.waitpid(killed, 0) == (killed, signal.SIGKILL), "the killed child's signal"
os.killpg(session_pid, 9)
for pid in (daemon_pid, member_pid, inner_pid):
    os.kill(pid, 9)
sys.exit(0)
