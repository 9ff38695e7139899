"""Signals and wake-ups as something to wait for, so that no work is done inside a signal handler."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any


class Signals:
    """While entered, collects ``signums`` instead of their usual effect. ``wake`` may be called by any thread."""

    def __init__(self, signums: Sequence[signal.Signals]) -> None:
        self._signums = signums
        self._came: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._fd_before = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in self._signums:
                if signal.getsignal(signum) is signal.SIG_IGN and signum == signal.SIGHUP:
                    continue  # nohup: stay deaf
                self._before[signum] = signal.signal(signum, self._note)
            # The C-level handler writes here at once, so a signal cannot fall between a look and the wait.
            self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._fd_before)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._reader.close()
        self._writer.close()

    def _note(self, signum: int, _: FrameType | None) -> None:
        self._came.append(signal.Signals(signum))

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last call, oldest first."""
        came, self._came = self._came, []
        return came

    def wake(self) -> None:
        """End the wait that is going on, or the next one."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def wait(self, timeout: float) -> None:
        """Wait for a signal, a wake-up or ``timeout`` seconds."""
        if self._came:
            return
        if select.select([self._reader], [], [], max(0.0, timeout))[0]:
            self._drain()

    def wait_writable(self, fd: int) -> bool:
        """Wait until ``fd`` takes bytes (True), or a signal or wake-up came (False)."""
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        poll.register(self._reader.fileno(), select.POLLIN)
        ready = dict(poll.poll(0 if self._came else 1000))
        if self._reader.fileno() in ready:
            self._drain()
        return fd in ready

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                continue
