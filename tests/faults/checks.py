"""What must be true after any schedule. Each check returns complaints; none means that the promise was kept."""

from __future__ import annotations

import itertools
import os
import re
import time
from dataclasses import replace
from pathlib import Path

from savedworker.model.record import State, WorkerRecord
from savedworker.store import logs
from tests.faults.bed import Bed
from tests.faults.tracker import Seen
from tests.faults.truth import undisturbed

EXIT_COST = 0.05
"""CPU seconds that killing a frozen worker may cost: its exit runs in the kernel, on its account."""
CLOCK_SLACK = 0.25


def complaints(bed: Bed, record: WorkerRecord, expected: State = State.SUCCEEDED) -> list[str]:
    """Everything that is wrong."""
    found = attribute(bed, record)
    if record.state is not expected:
        found.append(f"ended as {record.state} {record.reason} {record.detail}, not as {expected}")
    if expected is State.SUCCEEDED and record.state is expected:
        found += identity(bed, record) + output(bed) + counts(bed, record)
    found += order(bed) + repeats(bed, record) + usage(bed, record) + leftovers(bed)
    return found


def attribute(bed: Bed, record: WorkerRecord) -> list[str]:
    """Put into ``bed.tracker.seen`` the incarnation of the host from which each step came.

    The line itself tells one too, which the program read when it made the line: for the first step after a move, posted again
    because it was in flight at the freeze, that is an earlier one.
    """
    numbers = {x.launch: x.number for x in record.incarnations}
    by_address = {host.address: numbers[launch] for launch, host in bed.hosts.items() if launch in numbers}
    found, before = [], 0
    for i, x in enumerate(bed.tracker.seen):
        number = by_address.get(x.host, x.incarnation)
        again = i > 0 and bed.tracker.seen[i - 1].step == x.step
        if number != x.incarnation and not again and (number == before or x.incarnation > number):
            found.append(f"step {x.step} came from incarnation {number} and says {x.incarnation}")
        before = number
        bed.tracker.seen[i] = replace(x, incarnation=number)
    return found


def identity(bed: Bed, record: WorkerRecord) -> list[str]:
    """File and memory as of an undisturbed run."""
    digits, proof = undisturbed(bed.seed, bed.steps, bed.megabytes)
    found = []
    if bed.tracker.proof != proof:
        found.append("memory or hash chain differ from an undisturbed run")
    lines = [line.split() for line in bed.tracker.file]
    survivor = lines[-1][3] if lines else ""
    kept = [x for x in lines if x[3] == survivor]
    if [(x[0], x[1]) for x in kept] != [(str(n), d) for n, d in enumerate(digits)] or kept != lines:
        found.append(f"the captured file is wrong: {len(lines)} lines, {len(kept)} of the last process")
    numbers = [int(x[2]) for x in lines]
    if numbers != sorted(numbers) or not set(numbers) <= {x.number for x in record.incarnations}:
        found.append(f"the captured file's incarnations are {sorted(set(numbers))}")
    return found


def counts(bed: Bed, record: WorkerRecord) -> list[str]:
    """Every incarnation that worked is known to have; the same process is there after a restore, and only then."""
    known = {x.number: x for x in record.incarnations}
    # One that is lost between the thaw and saying so can be known to nobody.
    unsaid = {n for n, x in known.items() if x.started_at is None and x.end_reason == "no_notice"}
    worked = {x.incarnation: x.nonce for x in bed.tracker.seen if x.incarnation not in unsaid}
    found = [
        f"incarnation {n} worked, and the record does not know it"
        for n in worked
        if n not in known or known[n].started_at is None
    ]
    for before, after in itertools.pairwise(worked):
        restored = known[after].restored_from
        same = worked[before] == worked[after]
        if same and restored is None:
            found.append(f"incarnation {after} is the process of {before}, and no migration is reported")
        if not same and restored is not None and not _before_first_step(bed, restored, worked[before]):
            found.append(f"incarnation {after} is another process than {before}, and a migration is reported")
    restores = sum(x.restored_from is not None for x in record.incarnations)
    if restores != record.migrations:
        found.append(f"{record.migrations} migrations are reported for {restores} restores")
    return found


def _before_first_step(bed: Bed, number: str, nonce: str) -> bool:
    """Whether the checkpoint was taken before the process had drawn its nonce: a machine under load is slow."""
    frozen, first = frozen_at(bed, number), next(x.wall for x in bed.tracker.seen if x.nonce == nonce)
    return frozen is not None and frozen < first


def output(bed: Bed) -> list[str]:
    """Every line once, after the tails that are marked as discarded are taken out."""
    text = b""
    for piece in bed.client.logs(bed.worker, "stdout"):
        if isinstance(piece, logs.Text):
            text += piece.data
        elif piece.missing_bytes:
            return [f"{piece.missing_bytes} bytes of output never reached the store"]
        else:
            text = text[: piece.replay_from]
    if text.split() != [str(n).encode() for n in range(bed.steps)]:
        return [f"stdout is wrong: {text[-200:]!r}"]
    return []


def order(bed: Bed) -> list[str]:
    """Neither the tracker nor the ledger ever saw an incarnation after a later one."""
    found = []
    arrived = [x.incarnation for x in bed.tracker.seen]
    for before, after in itertools.pairwise(bed.tracker.seen):
        if after.incarnation < before.incarnation:
            found.append(
                f"incarnation {after.incarnation} posted step {after.step} {after.at - before.at:.3f} s "
                f"after incarnation {before.incarnation} had posted step {before.step}"
            )
    if 0 in arrived:
        found.append("a step knew no incarnation")
    ledger = bed.folder / "ledger/ledger"
    did = [int(x.split()[2]) for x in ledger.read_text().splitlines()] if ledger.exists() else []
    if did != sorted(did):
        found.append("the ledger has an incarnation after a later one")
    return found


def repeats(bed: Bed, record: WorkerRecord) -> list[str]:
    """Nothing missing; with notice nothing again but the one in flight; without, nothing from before the checkpoint."""
    found = []
    runs = [list(g) for _, g in itertools.groupby(bed.tracker.seen, key=lambda x: (x.incarnation, x.nonce))]
    known = {x.number: x for x in record.incarnations}
    for run in runs:
        for a, b in itertools.pairwise(run):
            if b.step not in (a.step, a.step + 1):
                found.append(f"step {b.step} came after {a.step} in incarnation {a.incarnation}")
    for before, after in itertools.pairwise(runs):
        if after[0].nonce != before[-1].nonce:
            if after[0].step != 0:
                found.append(f"another process began at step {after[0].step}")
            continue
        found += _between(before, after, known.get(after[0].incarnation), bed, record)
    return found


def _between(before: list[Seen], after: list[Seen], now: object, bed: Bed, record: WorkerRecord) -> list[str]:
    last, first = before[-1], after[0]
    if first.step > last.step + 1:
        return [f"steps {last.step + 1} to {first.step - 1} were never posted"]
    again = [x for x in before if x.step > first.step]  # the first may be the one in flight
    if not again:
        return []
    ended = next((x for x in record.incarnations if x.number == last.incarnation), None)
    restored = getattr(now, "restored_from", None) or getattr(now, "restore_from", None)
    frozen = frozen_at(bed, restored)
    if ended is not None and ended.end_reason == "notice" and not ended.lost_seconds:
        return [f"{len(again)} steps were done again after a notice (incarnation {last.incarnation})"]
    if frozen is not None and again[0].wall < frozen - CLOCK_SLACK:
        return [f"step {again[0].step} of before checkpoint {restored} was done again"]
    return []


def frozen_at(bed: Bed, number: str | None) -> float | None:
    """The wall clock at the freeze of checkpoint ``number``."""
    from savedworker.model import events as ev
    from savedworker.store.worker import WorkerStore

    for stored in WorkerStore(bed.client.store, bed.worker).events():
        if isinstance(stored.event, ev.CheckpointCommitted) and stored.event.number == number:
            return stored.event.frozen_at.timestamp()
    return None


def usage(bed: Bed, record: WorkerRecord) -> list[str]:
    """Proof of once: no old cgroup's CPU time grows after a new incarnation's first step."""
    found = []
    first: dict[int, float] = {}
    for x in bed.tracker.seen:
        first.setdefault(x.incarnation, x.at)
    for old in record.incarnations:
        later = [at for number, at in first.items() if number > old.number]
        samples = bed.usage.get(old.launch, [])
        if not later or not samples:
            continue
        began = min(later)
        after = [used for at, used in samples if at >= began]
        grown = after[-1] - after[0] if after else 0.0
        if grown > EXIT_COST:
            found.append(
                f"incarnation {old.number} used {grown:.3f} s of CPU after a later one had posted its first step"
            )
    return found


def leftovers(bed: Bed, seconds: float = 8.0) -> list[str]:
    """No process, mount, namespace, link, cgroup or address file of this bed's hosts is left, in a few seconds at most.

    A host counts as ended when its processes are; its daemon then removes the rest.
    """
    until = time.monotonic() + seconds
    while (found := _left(bed)) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _left(bed: Bed) -> list[str]:
    found = []
    local = str(bed.folder / "local")
    found += [
        f"mount {x.split()[4]}" for x in Path("/proc/self/mountinfo").read_text().splitlines() if local in x
    ]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if local in command and int(pid) != os.getpid():
            found.append(f"process {pid}: {command[:160]}")
    for file in Path(local, "hosts").glob("*/host.json"):
        match = re.search(r'"instance": *"host-([0-9a-f]+)"', file.read_text())
        if not match:
            continue
        short = match[1]
        address = ".".join(map(str, (198, 18, *bytes.fromhex(short))))
        claim = Path("/run/savedworker/addresses", address)
        if claim.exists() and local in claim.read_text():
            found.append(f"address file {address}")
            continue
        if not (file.parent / "ended.json").exists():
            found.append(f"host {short} has no end")
        if (file.parent / "scratch").exists():
            found.append(f"scratch of host {short}")
        places = [Path(f"/run/netns/sw-{short}"), Path(f"/sys/class/net/swv{short}")]
        places += [Path(root, "savedworker", f"host-{short}") for root in Path("/sys/fs/cgroup").iterdir()]
        if not claim.exists():  # else the name has a new owner by now
            found += [str(place) for place in places if place.exists()]
    return found
