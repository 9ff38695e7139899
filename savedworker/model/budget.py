"""The memory that an agent may use for checkpoints, and what it is spent on: plain functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from savedworker.model.defaults import MEMORY_BUDGET, MEMORY_BUDGET_LEAST
from savedworker.model.errors import Refused
from savedworker.model.units import format_size

_MIB = 1 << 20
_AGENT = 96 * _MIB
"""What an agent has in use at any time: the interpreter and its libraries."""
_THREAD = 112 * _MIB
"""What one thread holds at most: 32 MiB of changes and the windows that they are found in, once as they are, once compressed, once
sealed."""
MOST_THREADS = 8
"""More threads than cores hide the store's latency; more than these did not help."""
_MOST_WAITING = 256 * _MIB


@dataclass(frozen=True)
class Shares:
    """What a budget allows."""

    threads: int
    """That store or fetch at once."""
    waiting: int
    """Bytes that are read ahead of them."""


def shares(budget: int) -> Shares:
    """How ``budget`` bytes are spent. Fewer threads are slower where the store's answers take long."""
    rest = max(0, budget - _AGENT)
    return Shares(
        threads=max(1, min(MOST_THREADS, rest // _THREAD)),
        waiting=max(16 * _MIB, min(_MOST_WAITING, rest // 4)),
    )


def check_budget(size: int) -> int:
    """``size`` if an agent can work with so many bytes. Raises Refused."""
    if size < MEMORY_BUDGET_LEAST:
        raise Refused(
            f"a memory budget of {format_size(size)} is too small for an agent",
            f"give {format_size(MEMORY_BUDGET_LEAST)} or more",
        )
    return size


def choose_budget(wanted: int | None, here: int | None, machine: int) -> int:
    """The budget on an instance with ``machine`` bytes of memory.

    ``wanted`` by the worker's specification goes before what is configured ``here``, on the instance. Without either, it is the
    default, and less where that were more than a quarter of the instance. Raises Refused for one that cannot be.
    """
    configured = wanted if wanted is not None else here
    if configured is None:
        return max(MEMORY_BUDGET_LEAST, min(MEMORY_BUDGET, machine // 4))
    if check_budget(configured) > machine:
        raise Refused(
            f"a memory budget of {format_size(configured)} is more than this instance has ({format_size(machine)})",
            "give less, in the specification (checkpoint.memory_budget) or in SAVEDWORKER_MEMORY_BUDGET",
        )
    return configured
