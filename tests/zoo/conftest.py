"""Fixtures of the zoo."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.conftest import store_url, world
from tests.runtime.gate import Gate
from tests.zoo import zoo

__all__ = ["store_url", "world"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/zoo" in str(item.fspath):
            item.add_marker(pytest.mark.criu)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled programs, where workers of any user see them."""
    folder = tmp_path_factory.mktemp("zoo-programs")
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    zoo.build(folder)
    return folder


@pytest.fixture
def outside(gate: Gate) -> Iterator[None]:
    """Servers outside every worker, behind sockets on the volume: one echoes, one swallows."""
    echo, swallow = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    here = os.open(gate.folder, os.O_RDONLY)  # a socket's path may have 107 bytes only
    echo.bind(f"/proc/self/fd/{here}/outside.socket")
    swallow.bind(f"/proc/self/fd/{here}/outside.log")
    os.close(here)
    echo.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = echo.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    def drop() -> None:
        while True:
            try:
                if not swallow.recv(4096):
                    return
            except OSError:
                return

    threads = [threading.Thread(target=x, daemon=True) for x in (serve, drop)]
    for thread in threads:
        thread.start()
    yield
    echo.shutdown(socket.SHUT_RDWR)
    swallow.shutdown(socket.SHUT_RDWR)
    echo.close()
    swallow.close()


@pytest.fixture
def note() -> Callable[..., None]:
    """Adds a result to the file that ``scripts/compatibility`` reads; without it results go nowhere."""
    file = os.environ.get("SAVEDWORKER_ZOO_RESULTS")

    def add(**fields: object) -> None:
        if file:
            with open(file, "a") as out:
                out.write(json.dumps(fields) + "\n")

    return add
