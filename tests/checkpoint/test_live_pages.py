"""``pages.c`` beside a stand-in for CRIU and for the code that it puts into processes: who is asked for pages, and where they go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from savedworker.checkpoint import native

FILL, OTHER, PAGE = 66, 70, 4096

PARTS = """
import array, ctypes, json, os, socket, struct, sys
FILL, OTHER, PAGE = 66, 70, 4096

class Process:
    def __init__(self):
        self.ours, process = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.report, told = os.pipe()
        if not os.fork():
            self.ours.close()
            asked = []
            while message := process.recv(12):
                command = struct.unpack("IIi", message)[0]
                asked.append(command)
                if command == FILL and asked[-2:-1] != [OTHER]:  # what comes after the other one has no pipe with it
                    _, found, *_ = process.recvmsg(1, socket.CMSG_LEN(4))
                    pipe = struct.unpack("i", found[0][2])[0]
                    os.write(pipe, b"p" * PAGE)
                    os.close(pipe)
                process.send(struct.pack("IIi", command, command, 0))
            os.write(told, json.dumps(asked).encode())
            os._exit(0)
        process.close()
        os.close(told)

    def ask(self, command, pipe=None):
        assert self.ours.send(struct.pack("IIi", command, 0, 0)) == 12
        if pipe is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pipe]))]
            assert self.ours.sendmsg([b"-"], rights) == 1
        assert struct.unpack("IIi", self.ours.recv(12)) == (command, command, 0)

    def asked(self):
        self.ours.close()
        return json.loads(os.read(self.report, 4096))

def image(name):
    return os.open(name, os.O_WRONLY | os.O_CREAT)

def move(pipe, file):
    assert os.splice(pipe, file, PAGE) == PAGE
"""

DUMP = """
process, pages = Process(), image("pages-1.img")
(end, pipe), (other_end, other_pipe) = os.pipe(), os.pipe()
process.ask(FILL, pipe)
process.ask(FILL, other_pipe)
move(end, pages)
move(other_end, pages)
process.ask(FILL, pipe)
move(end, pages)
process.ask(OTHER)
process.ask(FILL)
process.ask(FILL, other_pipe)
move(other_end, pages)
first = process.asked()
process, pages = Process(), image("pages-2.img")
end, pipe = os.pipe()
process.ask(FILL + 1)
process.ask(FILL, pipe)
move(end, pages)
second = process.asked()
end, pipe = os.pipe()
os.write(pipe, b"d" * PAGE)
move(end, image("pipes-data.img"))
end, pipe = os.pipe()
memory = ctypes.create_string_buffer(b"s" * PAGE, PAGE)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
assert ctypes.CDLL(None).vmsplice(pipe, ctypes.byref(Vector(ctypes.addressof(memory), PAGE)), 1, 0) == PAGE
move(end, image("pages-3.img"))
print(json.dumps([first, second]))
"""

READ = """
process = Process()
end, pipe = os.pipe()
for _ in range(3):
    process.ask(FILL, pipe)
    assert os.read(end, PAGE) == b"p" * PAGE
print(json.dumps(process.asked()))
"""


def run(program: str, folder: Path, live: bool) -> Any:
    (library,) = (x for x in native.build_all() if x.name.startswith("pages-"))
    done = subprocess.run(
        [sys.executable, "-c", PARTS + program],
        cwd=folder,
        env={"LD_PRELOAD": str(library)} | ({native.LIVE_PAGES: "live"} if live else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("live", [True, False])
def test_processes_fill_only_the_pipes_before_the_first_that_was_emptied(tmp_path: Path, live: bool) -> None:
    first, second = run(DUMP, tmp_path, live)
    if live:
        # After the other command came the one that fills, without a pipe: it was sent.
        assert (first, second) == ([FILL, FILL, OTHER, FILL], [FILL + 1])
    else:
        assert (first, second) == ([FILL, FILL, FILL, OTHER, FILL, FILL], [FILL + 1, FILL])
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {
        "pages-1.img": b"" if live else b"p" * 4 * PAGE,
        "pages-2.img": b"" if live else b"p" * PAGE,
        "pages-3.img": b"s" * PAGE,
        "pipes-data.img": b"d" * PAGE,
    }


@pytest.mark.parametrize("live", [True, False])
def test_pipes_that_are_emptied_in_another_way_are_always_filled(tmp_path: Path, live: bool) -> None:
    assert run(READ, tmp_path, live) == [FILL] * 3
