"""The agent's bundle, made by the script that users run, and roots to put it in."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/opt/savedworker/libexec/python3"
"""In a root that has nothing but the bundle, the only interpreter."""


def make(folder: Path) -> Path:
    """The bundle, from the packages that are installed here: nothing is fetched. Takes about 15 s."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = Path("/usr/bin/python3")
    found = subprocess.run(
        [interpreter, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
        capture_output=True,
        text=True,
        check=True,
    )
    same = found.stdout.strip() == version
    site = ["--site", sysconfig.get_path("purelib")] if same else []
    subprocess.run(
        [sys.executable, ROOT / "scripts/make-bundle", folder, *site], check=True, capture_output=True
    )
    return folder


def bare_root(folder: Path, bundle: Path) -> Path:
    """A root file system with the bundle and nothing else: no shell, no C library, no Python."""
    for name in ("dev", "etc", "opt", "proc", "sys", "tmp", "var"):
        (folder / name).mkdir(parents=True)
    shutil.copytree(bundle, folder / "opt/savedworker", symlinks=True)
    return folder
