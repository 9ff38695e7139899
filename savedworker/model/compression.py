"""How hard the data of a checkpoint is compressed: a plain function of what was measured of this instance and its store.

Compression costs CPU-seconds and saves bytes on the way to the store. Both go on at the same time, so what counts is the slower one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LEVELS = (-3, -1, 1, 2, 5)
"""Levels of zstd that are used, the fastest first."""
FIRST_LEVEL = 1
"""Until something was measured."""
_COST = {-3: 0.7, -1: 0.9, 1: 1.0, 2: 1.3, 5: 3.6}
"""CPU-seconds at a level, as a multiple of those at level 1 (medians of heaps, programs and numbers; zstd 1.5), until it was tried."""
_SIZE = {-3: 1.4, -1: 1.15, 1: 1.0, 2: 0.93, 5: 0.87}
"""What comes out, likewise."""
_AS_GOOD = 1.05
"""A lower level that takes at most so many times as long as the best one is preferred: it leaves CPU to the worker."""
INCOMPRESSIBLE = 0.95
"""A sample that shrinks to more than this share of itself says that the rest is not worth the CPU either."""


@dataclass(frozen=True)
class Effect:
    """What a level does to this worker's data, as multiples of level 1."""

    cost: float
    size: float


@dataclass(frozen=True)
class Measured:
    """What was compressed and sent lately. Bytes and CPU-seconds of zstd are told as level 1 would have made them."""

    plain: int = 0
    packed: float = 0.0
    cpu: float = 0.0
    as_is: int = 0
    """Bytes that were stored without compression."""
    sent: int = 0
    sending: float = 0.0
    """Seconds that one request took after the other, as if there had been one at a time."""
    effects: Mapping[int, Effect] = field(default_factory=dict)
    """Of the levels that were tried."""

    def effect(self, level: int) -> Effect:
        """What was seen of ``level``, or what is usual."""
        return self.effects.get(level, Effect(_COST[level], _SIZE[level]))

    def tried(self, level: int, effect: Effect) -> Measured:
        """With one more trial of ``level``."""
        before = self.effects.get(level, effect)
        mixed = Effect((before.cost + effect.cost) / 2, (before.size + effect.size) / 2)
        return replace(self, effects={**self.effects, level: mixed})

    def compressed(self, level: int, plain: int, packed: int, cpu: float) -> Measured:
        """With ``plain`` bytes more, that became ``packed`` at ``level`` in ``cpu`` CPU-seconds."""
        return replace(
            self,
            plain=self.plain + plain,
            packed=self.packed + packed / self.effect(level).size,
            cpu=self.cpu + cpu / self.effect(level).cost,
        )

    def stored(self, as_is: int, sent: int, seconds: float) -> Measured:
        """With a request more, of ``sent`` bytes in ``seconds``, of which ``as_is`` were not compressed."""
        return replace(self, as_is=self.as_is + as_is, sent=self.sent + sent, sending=self.sending + seconds)

    def faded(self) -> Measured:
        """With half the weight."""
        return Measured(
            self.plain // 2,
            self.packed / 2,
            self.cpu / 2,
            self.as_is // 2,
            self.sent // 2,
            self.sending / 2,
            self.effects,
        )


def choose_level(seen: Measured, cores: int, senders: int, limit: float | None = None) -> int:
    """The level of zstd for what comes next.

    ``cores`` compress at once, and ``senders`` requests are under way at once, of which each is as fast as one was. ``limit``:
    bytes per second that may be sent, if they are limited.
    """
    if not seen.plain or seen.sending <= 0:
        return FIRST_LEVEL
    link = seen.sent / seen.sending * senders
    if limit is not None:
        link = min(link, limit)
    if link <= 0:
        return FIRST_LEVEL

    def seconds(level: int) -> float:
        effect = seen.effect(level)
        return max(seen.cpu * effect.cost / cores, (seen.packed * effect.size + seen.as_is) / link)

    best = min(map(seconds, LEVELS))
    return next(level for level in LEVELS if seconds(level) <= best * _AS_GOOD)
