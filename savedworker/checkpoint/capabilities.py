"""What this process may do."""

from __future__ import annotations

from pathlib import Path

CAP_SYS_RESOURCE = 24
CAP_SYS_ADMIN = 21
CAP_NET_ADMIN = 12


def effective(capability: int) -> bool:
    """True when this process has ``capability`` (its number in capabilities(7))."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False
