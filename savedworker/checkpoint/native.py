"""The small C programs: the worker's pid 1, CRIU's action script, and what is loaded into criu and into the agent.

Each is compiled once per machine into a folder named by its source's digest; scripts/setup and the agent image do it when
they are made, so that an instance needs no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
from pathlib import Path

from savedworker.checkpoint import capabilities
from savedworker.checkpoint.tools import PREFIX, Tools, need, run
from savedworker.model.errors import Fatal

_HERE = Path(__file__).parent
_PROGRAM = ("-static", "-s")
_LIBRARY = ("-shared", "-fPIC")
_FAST = (*_LIBRARY, "-O3")
_ALWAYS = ("restart.c", "pages.c", "freezer.c")
LIVE_PAGES = "SAVEDWORKER_PAGES"
"""Variable that, with the value "live", has CRIU leave the memory of processes out of its images (``pages.c``)."""


def init_program() -> Path:
    """The static pid 1 (``init.c``); it runs in any image. Raises Fatal when there is none and no compiler."""
    return _built("init.c", *_PROGRAM)


def hook_program() -> Path:
    """CRIU's action script (``hook.c``); it asks the socket beside the path by which it is called. Raises as above."""
    return _built("hook.c", *_PROGRAM)


def criu_environment(tools: Tools) -> dict[str, str]:
    """An environment in which runc finds our criu in PATH: a wrapper that loads what is in _ALWAYS into it.

    Without CAP_SYS_RESOURCE it loads ``prlimit.c`` as well: otherwise a process of another user than root cannot be dumped
    ("Can't get rlimit", seen with CRIU 4.2.1 on 6.18).
    """
    libraries = [_built(name, *_LIBRARY) for name in _ALWAYS]
    if not capabilities.effective(capabilities.CAP_SYS_RESOURCE):
        libraries.append(_built("prlimit.c", *_LIBRARY))
    text = f'#!/bin/sh\nLD_PRELOAD={":".join(map(str, libraries))} exec {tools.criu} "$@"\n'
    folder = libraries[0].with_name(f"criu-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
    if not (folder / "criu").exists():
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as script:
            script.write(text)
        os.chmod(script.name, 0o755)
        os.rename(script.name, folder / "criu")
    path = os.environ.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return {"PATH": f"{folder}:{path}", "LANG": "C.UTF-8"}


@functools.cache
def comparer() -> ctypes.CDLL:
    """What compares memory with its base, ``memory/compare.c``, loaded. Raises Fatal."""
    path = _built("memory/compare.c", *_FAST)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Fatal(f"{path} cannot be loaded: {error}", "remove it, and run scripts/setup") from error
    array, number = ctypes.c_void_p, ctypes.c_int64
    library.compare.argtypes = (ctypes.c_int, number, array, array, number, array, number, array, array)
    return library


def prepare() -> None:
    """Have all of it here, and able to run, before it is needed in a freeze. Raises Fatal."""
    build_all()
    comparer()


def _built(name: str, *flags: str) -> Path:
    source = _HERE / name
    digest = hashlib.sha256(" ".join(flags).encode() + source.read_bytes()).hexdigest()[:12]
    target = PREFIX / "lib" / "savedworker" / f"{source.stem}-{digest}"
    if target.exists():
        return target
    compiler = need("cc", "gcc and libc6-dev")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / source.stem
        run([compiler, "-Os", "-Wall", *flags, "-o", made, source], timeout=120)
        made.chmod(0o755)
        made.rename(target)
    return target


def build_all() -> list[Path]:
    """Compile every program that is not there yet; where they are. Raises Fatal without a compiler."""
    libraries = [_built(name, *_LIBRARY) for name in (*_ALWAYS, "prlimit.c")]
    return [init_program(), hook_program(), _built("memory/compare.c", *_FAST), *libraries]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path}\n" for path in build_all()))
