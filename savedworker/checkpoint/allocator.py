"""Memory for processes that fetch and store a lot: buffers of megabytes, taken and given back all the time.

Page by page, as the C library's malloc gets it from the kernel, that was a sixth of the time of a restore (2 GiB, two cores).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def in_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment like ``environ`` for a process whose malloc asks for transparent huge pages, unless that says something of it.

    glibc 2.35 and later read it when a process begins; everything else ignores it.
    """
    given = environ.get(TUNABLES, "")
    if _HUGE_PAGES in given:
        return dict(environ)
    return {**environ, TUNABLES: ":".join(filter(None, (given, f"{_HUGE_PAGES}=1")))}


def begin_again_in_huge_pages() -> None:
    """Have this very program run so, from its start, unless it does already. Not for one that has begun its work."""
    wanted = in_huge_pages(os.environ)
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
