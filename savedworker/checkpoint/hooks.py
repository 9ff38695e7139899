"""CRIU's action script: code of ours that runs at exact moments of a dump or restore, while the worker is frozen."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from savedworker.checkpoint import native

log = logging.getLogger(__name__)

Action = Callable[[], None]


@contextlib.contextmanager
def serving(folder: Path, handlers: dict[str, Action]) -> Iterator[tuple[Path, Failure]]:
    """Serve ``handlers`` (by CRIU action name) during the block; yields (script path, the failure, if a handler raised).

    A handler that raises makes the script exit 1; the exception is kept in the second value. Other actions are answered at once.
    """
    failure = Failure()
    server = socket.socket(socket.AF_UNIX)
    # A socket's path may have 107 bytes only and the state directory can be deep, so both sides go through our descriptor.
    # Nothing of it outlives the folder, also when this process is killed.
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    (folder / "hook.sock").unlink(missing_ok=True)
    server.bind(f"/proc/self/fd/{opened}/hook.sock")
    server.listen(4)
    # CRIU gives the script's path to system(3), so it must not be that of the folder: that may hold anything.
    script = Path(f"/proc/{os.getpid()}/fd/{opened}/criu-action")
    (folder / script.name).unlink(missing_ok=True)
    (folder / script.name).symlink_to(native.hook_program())

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed: the block has ended
            with connection:
                _answer(connection, handlers, failure)

    thread = threading.Thread(target=serve, name="criu-hooks", daemon=True)
    thread.start()
    try:
        yield script, failure
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()  # what a handler is at must not go on behind the caller's back
        os.close(opened)
        (folder / "hook.sock").unlink(missing_ok=True)


class Failure:
    """What a handler raised."""

    def __init__(self) -> None:
        self.error: BaseException | None = None


def _answer(connection: socket.socket, handlers: dict[str, Action], failure: Failure) -> None:
    try:
        action = connection.makefile("rb").readline(64).decode().strip()
        handler = handlers.get(action)
        try:
            if handler is not None:
                handler()
        except Exception as error:  # noqa: BLE001 - whatever it is, the dump is aborted and the caller told
            failure.error = error
            connection.sendall(b"1\n")
            return
        connection.sendall(b"0\n")
    except OSError as error:
        log.warning("CRIU's action script went away: %s", error)
