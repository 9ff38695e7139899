"""Whether workers would fit their notice now: what ``savedworker doctor`` says of one worker, and of a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from savedworker.fleet.base import notice_of
from savedworker.fleet.finding import Finding
from savedworker.model.errors import SavedWorkerError
from savedworker.model.rates import Rates
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.model.units import format_duration, format_size
from savedworker.store.backend import Store
from savedworker.store.sealing import PLAIN
from savedworker.store.worker import WorkerStore, list_workers

LOOKED_AT = 50
"""Workers whose record doctor reads, at most: a large store is not read from end to end for one line."""
_OFTEN = "take checkpoints more often (--checkpoint-interval auto), so that less is left to be stored"


def worker_findings(store: Store, worker: str, fleet: str | None, now: datetime) -> Iterator[Finding]:
    """What there is to say of one worker; ``fleet``: whose notice is asked about, its own unless given. Raises NotFound, NoKey."""
    documents = WorkerStore(store, worker)
    spec, record = documents.load_spec(), documents.load_record().record
    yield protection_finding(record)
    yield fit_finding(record, fleet or spec.fleet, now)
    yield sealing_finding(documents, spec)


def protection_finding(record: WorkerRecord) -> Finding:
    """What the agent itself says."""
    if record.state.terminal:
        return Finding("protection", "OK", f"{record.id} has ended ({record.state})")
    if record.protected:
        return Finding("protection", "OK", f"{record.id} is protected ({record.state})")
    why = "; ".join(record.unprotected_reasons) or "it is not known why"
    return Finding("protection", "WARN", f"{record.id} is not protected: {why}", "see `savedworker report`")


def fit_finding(record: WorkerRecord, fleet: str, now: datetime) -> Finding:
    """Whether it would fit a notice of ``fleet``, by the rates and the size of its last checkpoint."""
    notice = notice_of(fleet)
    gives = f"a notice on {fleet} gives {format_duration(notice)}"
    if record.rates is None or not record.checkpoints:
        return Finding(
            "notice",
            "WARN",
            f"nothing was measured yet, and {gives}",
            f"take a checkpoint (`savedworker checkpoint {record.id}`) and ask again",
        )
    last = record.checkpoints[-1]
    need = record.rates.seconds(last.bytes_image)
    known = min(record.rates.base, last.bytes_image)
    detail = (
        f"a last checkpoint would take about {format_duration(need)}, and {gives} ({format_size(last.bytes_image)} of memory, "
        f"{format_size(known)} of it known, {format_duration(max(0.0, (now - last.committed_at).total_seconds()))} ago)"
    )
    return Finding("notice", "OK" if need <= notice else "WARN", detail, "" if need <= notice else _OFTEN)


def sealing_finding(documents: WorkerStore, spec: WorkerSpec) -> Finding:
    """Whether the worker is sealed."""
    if documents.sealer is PLAIN:
        return Finding(
            "encryption",
            "WARN",
            f"{spec.id} is plain in the store, its memory included",
            "see docs/encryption.md",
        )
    return Finding("encryption", "OK", f"{spec.id} is sealed")


def fleet_finding(store: Store, fleet: str) -> Finding:
    """How large a worker fits a notice of ``fleet``, by what its workers in this store measured."""
    notice = notice_of(fleet)
    measured = list(_measured(store, fleet))
    if not measured:
        return Finding(
            "notice",
            "OK",
            f"{fleet} gives {format_duration(notice)}; how much fits into that is told once a worker of it in this store has had a "
            "checkpoint (`savedworker bench` measures it here and now)",
        )
    sizes = sorted(rates.largest(notice) for rates in measured)
    between = format_size(sizes[0]) + (f" to {format_size(sizes[-1])}" if len(sizes) > 1 else "")
    return Finding(
        "notice",
        "OK",
        f"{fleet} gives {format_duration(notice)}: enough for {between} of memory that nothing is known of, by {len(sizes)} "
        f"worker{'s' if len(sizes) > 1 else ''} of this store; what earlier checkpoints have costs far less",
    )


def _measured(store: Store, fleet: str) -> Iterator[Rates]:
    for worker in list_workers(store)[:LOOKED_AT]:
        try:
            record = WorkerStore(store, worker).load_record().record
        except SavedWorkerError:
            continue
        if record.rates is not None and record.fleet == fleet:
            yield record.rates
