"""How fast this instance takes checkpoints, learnt from each one, and how long the next would take: plain functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from savedworker.model.defaults import INTERVAL_LEAST, INTERVAL_MOST

_MIB = 1 << 20
_WEIGHT = 0.5
"""Of the newest measurement against all before."""
_ENOUGH = 16 * _MIB
"""Bytes below which a time says little about a rate."""


@dataclass(frozen=True)
class Work:
    """What one checkpoint did. Bytes of memory images, and seconds of each part; ``rest`` is all else until the commit, as far as it comes again.

    ``store`` is None where it says nothing, as what was sent was limited.
    """

    new: int
    known: int
    """Of it, what the base knew: told against it, or replaced."""
    dump: float
    store: float | None
    rest: float


@dataclass(frozen=True)
class Pace:
    """Bytes per second of CRIU's dump, of storing new memory and of comparing known memory; seconds of the rest.

    The first figures are of a small instance with a distant store, so that nobody relies on what was never seen.
    """

    dump: float = 500 * _MIB
    new: float = 60 * _MIB
    known: float = 500 * _MIB
    rest: float = 1.0
    measured: int = 0
    """Checkpoints that it was learnt from."""
    stored: int = 0
    compared: int = 0
    """Of them, those that told how fast new and known memory is stored."""

    def seconds(self, new: int, known: int) -> float:
        """How long a checkpoint would take from its beginning to its commit."""
        return self.rest + (new + known) / self.dump + self.storing(new, known)

    def storing(self, new: int, known: int) -> float:
        """Of it, for storing so many bytes."""
        return new / self.new + known / self.known

    def measured_seconds(self, new: int, known: int) -> float:
        """As ``seconds``, of what was ever measured."""
        return self.seconds(new if self.stored else 0, known if self.compared else 0)

    def learnt(self, work: Work) -> Pace:
        """The pace after one more checkpoint."""
        share = _share(self.measured)
        pace = replace(
            self,
            dump=_mixed(share, self.dump, work.new + work.known, work.dump),
            rest=share * work.rest + (1 - share) * self.rest,
            measured=self.measured + 1,
        )
        if work.store is None:
            return pace
        expected = self.storing(work.new, work.known)
        # One sum was measured: each part of it is blamed alike.
        slower = work.store / expected if expected else 1.0
        return replace(
            pace,
            new=_mixed(_share(self.stored), self.new, work.new, slower * work.new / self.new),
            known=_mixed(_share(self.compared), self.known, work.known, slower * work.known / self.known),
            stored=self.stored + (work.new >= _ENOUGH),
            compared=self.compared + (work.known >= _ENOUGH),
        )


def _share(before: int) -> float:
    """What the newest measurement counts."""
    return _WEIGHT if before else 1.0


def _mixed(share: float, before: float, size: int, seconds: float) -> float:
    if size < _ENOUGH or seconds <= 0:
        return before
    return 1 / (share * seconds / size + (1 - share) / before)


FREEZE_SHARE = 0.01
"""Share of its time that a worker may spend frozen for periodic checkpoints."""


def next_interval(now: float, frozen: float, to_safe: float, notice: float) -> tuple[float, str]:
    """The checkpoint interval after ``now`` under ``auto``, in seconds, and why; an empty reason when it stays.

    ``frozen``: seconds of the last freeze. ``to_safe``: what a checkpoint would take now. ``notice``: what the fleet gives. More
    frequent ones leave less to be stored at a notice; their freezes must stay below FREEZE_SHARE.
    """
    least = max(INTERVAL_LEAST, frozen / FREEZE_SHARE)
    if now < least:
        return least, f"a freeze takes {frozen:.1f} s, which is to stay below {FREEZE_SHARE:.0%}"
    if to_safe > notice / 2 and now > least:
        return max(
            least, now / 2
        ), f"a checkpoint now would take {to_safe:.0f} s of the {notice:.0f} s of a notice"
    if to_safe < notice / 8 and now < INTERVAL_MOST:
        return min(
            INTERVAL_MOST, now * 2
        ), f"a checkpoint now would take only {to_safe:.1f} s of the {notice:.0f} s of a notice"
    return now, ""
