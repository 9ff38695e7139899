"""Fixtures of the tests that run real workers with hostile names, files and secrets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.conftest import gone
from tests.runtime.world import World

ODD = """it's a "dir" `touch pwned`, x: *?;&|<>\\ $HOME ü"""
"""A folder's name that nothing may take for anything else.

Without a closing parenthesis: with one in a mount point, CRIU 4.2.1 sometimes misreads /proc/PID/stat, whose end it seeks in a
buffer that still holds the mounts ("#fields do not match").
"""


@pytest.fixture
def odd_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A fleet and a store whose directories have the oddest of names; nothing is left afterwards."""
    local = Path(tempfile.mkdtemp(prefix="sw-", dir="/var/tmp"))
    monkeypatch.setenv("SAVEDWORKER_LOCAL_DIR", str(local / ODD))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-key-of-the-submitter")
    folder = tmp_path / ODD
    folder.mkdir()
    made = World(folder, f"{folder}/store")
    try:
        yield made
    finally:
        made.close()
        assert gone(str(local)) == []
        shutil.rmtree(local)
    assert not any(
        x.name == "pwned"
        for place in (Path.cwd(), Path("/"), folder, Path(os.environ["HOME"]))
        for x in place.iterdir()
    )
