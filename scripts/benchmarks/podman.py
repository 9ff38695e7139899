"""The peer: the same program under podman, saved with ``container checkpoint --export`` and brought back with ``restore --import``.

Debian's podman with our CRIU and runc, its own storage, no network. Where rlimits cannot be set (CAP_SYS_RESOURCE is missing), a
wrapper takes them out of config.json.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from savedworker.checkpoint.tools import PREFIX
from savedworker.model.errors import Fatal

PYTHON = "/usr/bin/python3"
"""Debian's interpreter, which is what the image has; ours runs the same one."""

_WRAPPER = """#!/usr/bin/python3
import json, os, sys
words = sys.argv[1:]
if "--bundle" in words:
    path = words[words.index("--bundle") + 1] + "/config.json"
    config = json.load(open(path))
    config["process"].pop("rlimits", None)
    json.dump(config, open(path, "w"))
os.environ["PATH"] = "{bin}:/usr/sbin:/usr/bin:/sbin:/bin"
os.execv("{bin}/runc", ["runc", *words])
"""


def installed() -> bool:
    """Whether there is a podman to compare with."""
    return shutil.which("podman") is not None


def version() -> str:
    """What it calls itself."""
    return subprocess.run(["podman", "--version"], capture_output=True, text=True, check=True).stdout.split()[
        -1
    ]


class Podman:
    """One container at a time below ``folder``. ``close`` takes everything away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.archive = folder / "checkpoint.tar.zst"
        folder.mkdir(parents=True)
        wrapper = folder / "runc"
        wrapper.write_text(_WRAPPER.format(bin=PREFIX / "bin"))
        wrapper.chmod(0o755)
        self._words = [
            *("podman", "--root", str(folder / "store"), "--runroot", str(folder / "run")),
            *("--runtime", str(wrapper), "--cgroup-manager", "cgroupfs", "--storage-driver", "vfs"),
        ]
        self._import_image()

    def _import_image(self) -> None:
        """An image with the interpreter, its modules and their libraries, of this machine."""
        modules = [*Path("/usr/lib/python3.11/lib-dynload").glob("*.so")]
        linked = subprocess.run(
            ["ldd", os.path.realpath(PYTHON), *map(str, modules)], capture_output=True, text=True, check=False
        ).stdout
        libraries = sorted(set(re.findall(r"(?:=> |^\s+)(/\S+)", linked, re.MULTILINE)))
        tar = self.folder / "root.tar"
        subprocess.run(
            [
                *("tar", "-chf", str(tar), "--exclude=test", "--exclude=__pycache__"),
                *(PYTHON, "/usr/lib/python3.11", *libraries),
            ],
            capture_output=True,
            check=True,
        )
        self("import", str(tar), "bench:latest")
        tar.unlink()

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [*self._words, *words],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": f"{PREFIX / 'bin'}:{os.environ['PATH']}"},
            check=False,
            timeout=900,
        )
        if done.returncode:
            raise Fatal(f"podman {words[0]} failed: {done.stderr.strip()[-300:]}")
        return done.stdout

    def start(self, program: str, *args: str) -> None:
        """Run a Python program and wait until it is ready."""
        self(
            "run",
            "-d",
            "--name",
            "peer",
            "--network",
            "none",
            "bench:latest",
            PYTHON,
            "-u",
            "-c",
            program,
            *args,
        )
        self.until("ready", 1)

    def until(self, text: str, times: int, seconds: float = 300.0) -> None:
        """Wait until the program has written ``text`` so often."""
        end = time.monotonic() + seconds
        while self("logs", "peer").count(text) < times:
            if time.monotonic() > end:
                raise Fatal(f"the peer did not write {text!r}")
            time.sleep(0.05)

    def change(self, times: int) -> None:
        """Have the program change its memory for the ``times``-th time."""
        self("kill", "--signal", str(int(signal.SIGUSR1)), "peer")
        self.until("changed", times)

    def export(self) -> tuple[float, float]:
        """``checkpoint --export``, compressed with zstd as by default; the container is gone then.

        Returns seconds until the command has ended, and until the archive is on the disk, as ours is when it is committed.
        """
        os.sync()
        started = time.monotonic()
        self("container", "checkpoint", "--export", str(self.archive), "--compress", "zstd", "peer")
        seconds = time.monotonic() - started
        with self.archive.open("rb") as file:
            os.fsync(file.fileno())
        durable = time.monotonic() - started
        self("rm", "-f", "peer")
        return seconds, durable

    def import_(self) -> float:
        """``restore --import`` of that archive. Returns seconds."""
        started = time.monotonic()
        self("container", "restore", "--import", str(self.archive))
        seconds = time.monotonic() - started
        self("rm", "-f", "-t", "0", "peer")
        self.archive.unlink()
        return seconds

    def close(self) -> None:
        """Remove containers, images and storage."""
        subprocess.run([*self._words, "system", "reset", "-f"], capture_output=True, check=False, timeout=300)
        subprocess.run(["umount", "-R", str(self.folder / "store")], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
