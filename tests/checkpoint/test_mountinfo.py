"""Mount points are found whatever their names are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from savedworker.checkpoint.mountinfo import mounts, mounts_below
from savedworker.cli import build_spec, doctor

pytestmark = pytest.mark.criu  # mounting needs root


@pytest.mark.parametrize("name", ["plain", "with a space", "tab\tand\nline", "back\\slash", "\\040", "ä"])
def test_a_mount_is_found(tmp_path: Path, name: str) -> None:
    outer, inner = tmp_path / name, tmp_path / name / "inner"
    outer.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(outer)], check=True)
    try:
        inner.mkdir()
        subprocess.run(["mount", "-t", "ramfs", "ramfs", str(inner)], check=True)
        try:
            assert mounts_below(tmp_path) == [inner, outer]
            assert [x.kind for x in mounts() if x.point in map(str, (outer, inner))] == ["tmpfs", "ramfs"]
            assert doctor._file_system(str(inner / "deeper")) == "ramfs"
            assert not build_spec._seen_inside(outer, None)
            assert build_spec._seen_inside(tmp_path, None) == build_spec._seen_inside(tmp_path.parent, None)
        finally:
            subprocess.run(["umount", str(inner)], check=True)
    finally:
        subprocess.run(["umount", str(outer)], check=True)
    assert mounts_below(tmp_path) == []
