"""How fast a worker's checkpoints are, as its agent measured it, and whether one would fit a notice: plain functions of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from savedworker.model.base import Bytes, Count, Frozen, Seconds

Rate = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
"""Bytes per second."""


class Rates(Frozen):
    """Measured by periodic checkpoints, which give way to the worker: the last one before a reclaim is rather faster."""

    dump: Rate
    """Of the memory image."""
    new: Rate
    """Of storing memory that the instance knows nothing of."""
    known: Rate
    """Of comparing memory with the base."""
    rest: Seconds
    """All else, until the commit."""
    base: Bytes
    """Memory that the base has: what is read ahead, and what earlier checkpoints stored."""
    measured: Count
    """Checkpoints that it was learnt from."""

    def seconds(self, image: int) -> float:
        """From a notice to the commit, for ``image`` bytes of memory."""
        known = min(self.base, image)
        return self.rest + image / self.dump + (image - known) / self.new + known / self.known

    def largest(self, notice: float) -> int:
        """Bytes of memory that fit into ``notice`` seconds when none of it is known: the worst case of any worker here."""
        return max(0, int((notice - self.rest) / (1 / self.dump + 1 / self.new)))
