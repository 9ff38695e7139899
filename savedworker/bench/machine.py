"""What a figure has to be read with: the machine, without names and paths."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from savedworker.checkpoint.tools import find_tools


def describe(folder: Path) -> dict[str, Any]:
    """This machine, and the disk below ``folder``."""
    tools = find_tools()
    return {
        "cores": os.cpu_count(),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "criu": tools.criu_version,
        "runc": tools.runc_version,
        "python": platform.python_version(),
        "disk": _disk(folder),
        "cgroup": 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1,
    }


def load() -> float:
    """Processes that wanted to run in the last minute: above the number of cores, others were measured along."""
    return round(os.getloadavg()[0], 1)


def _first(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _disk(folder: Path) -> str:
    """File system and kind of device, like ``ext4 on a virtio disk``."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        if words[2] == number:
            kind = words[words.index("-") + 1]
    block = Path(f"/sys/dev/block/{number}")
    if not block.exists():
        return kind
    name = block.resolve().name
    bus = "a virtio disk" if name.startswith("vd") else "NVMe" if name.startswith("nvme") else "a disk"
    return f"{kind} on {bus}"
