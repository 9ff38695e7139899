"""A workload whose every step leaves proof. usage: truth.py TRACKER SEED STEPS PAUSE FOLDER LEDGER MEGABYTES

Each step extends a hash chain and changes a page of a block of memory, writes one line to a captured file, one to stdout and
one to the ledger (a volume, so what a lost incarnation did stays on record), and posts its number to a tracker outside.
Every line carries the incarnation, as /.savedworker/incarnation tells it, and a nonce drawn when the process began.
Standard library only; it knows nothing of checkpoints. As a module: what an undisturbed run leaves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import sys
import time

PAGE = 4096


class Chain:
    """The part that must survive: a digest and a block of memory, both a function of the seed and the number of steps."""

    def __init__(self, seed: int, megabytes: float) -> None:
        self.digest = hashlib.sha256(str(seed).encode()).digest()
        self.memory = bytearray(random.Random(seed).randbytes(int(megabytes * (1 << 20))))

    def step(self, number: int) -> str:
        """Go on by one; the first digits of the digest."""
        self.digest = hashlib.sha256(self.digest + str(number).encode()).digest()
        at = int.from_bytes(self.digest[:4], "big") % (len(self.memory) // PAGE) * PAGE
        self.memory[at : at + PAGE] = self.digest * (PAGE // len(self.digest))
        return self.digest.hex()[:12]

    def proof(self) -> str:
        """What only the undisturbed memory gives."""
        return hashlib.sha256(self.digest + self.memory).hexdigest()


def undisturbed(seed: int, steps: int, megabytes: float) -> tuple[list[str], str]:
    """The chain's digits after each step, and the proof at the end."""
    chain = Chain(seed, megabytes)
    return [chain.step(n) for n in range(steps)], chain.proof()


class Tracker:
    """A keep-alive connection; what is not answered is posted again, over a new one."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None

    def post(self, words: str) -> None:
        while True:
            try:
                if self._socket is None:
                    self._socket = socket.create_connection(self._address, timeout=3)
                self._socket.sendall(words.encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    part = self._socket.recv(64)
                    if not part:
                        raise ConnectionError("the tracker went away")
                    answer += part
                return
            except OSError:
                if self._socket is not None:
                    self._socket.close()
                self._socket = None
                time.sleep(0.02)


def incarnation() -> str:
    try:
        with open("/.savedworker/incarnation") as file:
            return file.read().strip()
    except OSError:
        return "0"


def main(address: str, seed: str, steps: str, pause: str, folder: str, ledger: str, megabytes: str) -> None:
    chain = Chain(int(seed), float(megabytes))
    nonce = os.urandom(6).hex()
    tracker = Tracker(address)
    os.makedirs(folder, exist_ok=True)
    captured = os.open(f"{folder}/steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(int(steps)):
        digits = chain.step(number)
        line = f"{number} {digits} {incarnation()} {nonce}"
        os.write(captured, line.encode() + b"\n")
        os.write(1, f"{number}\n".encode())
        with contextlib.suppress(OSError):
            kept = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(kept, line.encode() + b"\n")
            os.close(kept)
        tracker.post(f"step {line}")
        time.sleep(float(pause))
    with open(f"{folder}/steps", "rb") as file:
        tracker.post(f"end {chain.proof()} {file.read().hex()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
