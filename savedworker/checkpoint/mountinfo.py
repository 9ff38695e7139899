"""What /proc/PID/mountinfo writes (proc_pid_mountinfo(5))."""

from __future__ import annotations

import re

_OCTAL = re.compile(r"\\([0-7]{3})")


def plain(field: str) -> str:
    """A field without its octal escapes."""
    return _OCTAL.sub(lambda code: chr(int(code[1], 8)), field)
