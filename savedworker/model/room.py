"""Where a restore puts the images that CRIU reads, in memory or on disk: a plain function of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from savedworker.model.units import format_size

_MIB = 1 << 20
READ_AHEAD = 128 * _MIB
"""What CRIU reads for one process before it gives these pages of the image back (AUTO_DEDUP_OVERHEAD_BYTES in its sources)."""
MARGIN = 256 * _MIB
"""What stays free besides, for everything else on the instance."""


@dataclass(frozen=True)
class Room:
    """Bytes of memory that could be had at one place: of the machine, or within the limit of one cgroup."""

    free: int
    where: str


@dataclass(frozen=True)
class Place:
    """Where the images are put, and why."""

    in_memory: bool
    why: str


def memory_need(images: int, spaces: int, beside: int, budget: int) -> int:
    """Bytes that a restore needs with its images in memory, until the worker runs.

    ``images``: their bytes, which become the worker's own while CRIU reads them, ``spaces`` of them at a time. ``beside``: what else of
    the worker is in memory, ``/dev/shm``. ``budget``: what the agent itself may use.
    """
    return images + min(images, spaces * READ_AHEAD) + beside + budget + MARGIN


def choose_place(need: int, rooms: list[Room]) -> Place:
    """In memory if ``need`` bytes fit every room; on disk otherwise, and where nothing is known of the memory."""
    if not rooms:
        return Place(False, "it is not known how much memory is free")
    least = min(rooms, key=lambda room: room.free)
    have = f"{format_size(max(0, least.free))} {least.where}"
    if need <= least.free:
        return Place(True, f"{format_size(need)} are needed, {have}")
    return Place(False, f"in memory {format_size(need)} would be needed, {have}")
