"""Fingerprint: what an instance has to have so that a checkpoint can be restored on it."""

from __future__ import annotations

import re

from pydantic import Field

from savedworker.model.base import Frozen


class Gpu(Frozen):
    """One GPU as the driver names it. Memory in bytes."""

    model: str
    memory: int
    driver: str


class Fingerprint(Frozen):
    """The facts of the source instance. ``mapped_files`` are paths outside the writable layer, with a digest each."""

    machine: str
    """``uname -m``."""
    cpu_flags: tuple[str, ...] = ()
    """Sorted CPU features, as in /proc/cpuinfo."""
    criu: str = ""
    runc: str = ""
    image: str = "host"
    mapped_files: dict[str, str] = Field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()


def mismatches(source: Fingerprint, target: Fingerprint) -> list[str]:
    """Why ``target`` cannot take a checkpoint from ``source``: empty when it can.

    The target has to be of the same machine type, have every CPU feature of the source, tools that are not older,
    the same digest for every mapped file, and equal GPUs (ARCHITECTURE: compatible means).
    """
    found = []
    if source.machine != target.machine:
        found.append(f"machine type {target.machine}, not {source.machine}")
    missing = sorted(set(source.cpu_flags) - set(target.cpu_flags))
    if missing:
        found.append(f"CPU features missing: {' '.join(missing[:8])}{' …' if len(missing) > 8 else ''}")
    for tool in ("criu", "runc"):
        old, new = getattr(source, tool), getattr(target, tool)
        if _version(new) < _version(old):
            found.append(f"{tool} {new or 'missing'} is older than {old}")
    if source.image != target.image:
        found.append(f"image {target.image}, not {source.image}")
    for path, digest in sorted(source.mapped_files.items()):
        there = target.mapped_files.get(path)
        if there != digest:
            found.append(f"{path} is {'missing' if there is None else 'another file'}")
    if source.gpus != target.gpus:
        found.append("other GPUs or GPU driver")
    return found


def _version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, without zeros at the end: 4.2.0 is 4.2, and 1.3.6-rc1 is 1.3.6."""
    parts = []
    for part in text.split("."):
        digits = re.match(r"[0-9]*", part)
        if not digits or not digits[0]:
            break
        parts.append(int(digits[0][:18]))
        if digits[0] != part:
            break
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
