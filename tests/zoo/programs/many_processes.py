"""100 processes in a ring of pipes: a token goes round, every process adds its pid, and all pids stay the same."""

import os

from common import run

COUNT = 100
pipes = [os.pipe() for _ in range(COUNT + 1)]
pids = []
for i in range(COUNT):
    pid = os.fork()
    if pid == 0:
        for n, ends in enumerate(
            pipes
        ):  # only what it needs: a hundred times two hundred descriptors are another test
            for end in {ends[0] if n != i else -1, ends[1] if n != i + 1 else -1} - {-1}:
                os.close(end)
        while data := os.read(pipes[i][0], 4096):
            os.write(pipes[i + 1][1], data + f" {os.getpid()}".encode())
        os._exit(0)
    pids.append(pid)


def check(n: int) -> None:
    os.write(pipes[0][1], str(n).encode())
    words = os.read(pipes[COUNT][0], 4096).split()
    assert [int(w) for w in words] == [n, *pids], words


run(check)
for pid in pids:
    os.kill(pid, 9)
