"""A volume through which a test tells a running program what to do, so that neither side has to sleep and hope."""

from __future__ import annotations

from pathlib import Path

from savedworker.model.spec import Volume

PRELUDE = """
import os, sys, time
def closed(name):
    return not os.path.exists("/gate/" + name)
def wait_for(name):
    while closed(name):
        time.sleep(0.02)
def say(*words):
    # one write: lines of several threads and processes do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


class Gate:
    """Names that the test opens and the program waits for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        folder.chmod(0o777)

    @property
    def volume(self) -> Volume:
        return Volume(source=str(self.folder), target="/gate")

    def open(self, name: str) -> None:
        """Let the program pass."""
        (self.folder / name).touch()
