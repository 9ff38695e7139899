"""``pages.c`` beside a stand-in for CRIU and for the code that it puts into a process: who is asked for pages, and where they go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from savedworker.checkpoint import native

FILL, OTHER, PAGE = 66, 70, 4096

DUMP = """
import array, ctypes, json, os, socket, struct, sys
FILL, OTHER, PAGE = 66, 70, 4096
libc = ctypes.CDLL(None, use_errno=True)
ours, process = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
rights = lambda fd: [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]

report, told = os.pipe()
if not os.fork():  # the process
    ours.close()
    asked = []
    while message := process.recv(12):
        command = struct.unpack("IIi", message)[0]
        asked.append(command)
        if command == FILL and asked[-2:-1] != [OTHER]:
            _, found, *_ = process.recvmsg(1, socket.CMSG_LEN(4))
            pipe = struct.unpack("i", found[0][2])[0]
            os.write(pipe, b"p" * PAGE)
            os.close(pipe)
        process.send(struct.pack("IIi", command, command, 0))
    os.write(told, json.dumps(asked).encode())
    os._exit(0)
process.close()
os.close(told)

def ask(command, pipe=None):
    assert ours.send(struct.pack("IIi", command, 0, 0)) == 12
    if pipe is not None:
        assert ours.sendmsg([b"-"], rights(pipe)) == 1
    assert struct.unpack("IIi", ours.recv(12)) == (command, command, 0)

pages = os.open("pages-1.img", os.O_WRONLY | os.O_CREAT)
moved = []
end, pipe = os.pipe()
for _ in range(2):
    ask(FILL, pipe)
    moved.append(os.splice(end, pages, PAGE))
ask(OTHER)
ask(FILL)
ask(FILL, pipe)
moved.append(os.splice(end, pages, PAGE))
shared = os.open("pages-2.img", os.O_WRONLY | os.O_CREAT)
end, pipe = os.pipe()
memory = ctypes.create_string_buffer(b"s" * PAGE, PAGE)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
assert libc.vmsplice(pipe, ctypes.byref(Vector(ctypes.addressof(memory), PAGE)), 1, 0) == PAGE
moved.append(os.splice(end, shared, PAGE))
ours.close()
print(json.dumps([json.loads(os.read(report, 4096)), moved]))
"""


@pytest.mark.parametrize("live", [True, False])
def test_only_the_first_pipe_is_filled_by_the_process(tmp_path: Path, live: bool) -> None:
    (library,) = (x for x in native.build_all() if x.name.startswith("pages-"))
    done = subprocess.run(
        [sys.executable, "-c", DUMP],
        cwd=tmp_path,
        env={"LD_PRELOAD": str(library)} | ({native.LIVE_PAGES: "live"} if live else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked, moved = json.loads(done.stdout)
    # After the other command came one that fills, without a pipe: it was sent.
    assert asked == ([FILL, OTHER, FILL] if live else [FILL, FILL, OTHER, FILL, FILL])
    assert moved == [PAGE] * 4
    written = [(tmp_path / f"pages-{n}.img").read_bytes() for n in (1, 2)]
    assert written == [b"" if live else b"p" * 3 * PAGE, b"s" * PAGE]
