"""Good documents of every kind, and ways to make them bad."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from savedworker.model.fingerprint import Fingerprint, Gpu
from savedworker.model.manifest import (
    ImageFile,
    Manifest,
    MemoryGroup,
    OpenVolumeFile,
    Runtime,
    StoredFile,
    StoredMemory,
    StreamPosition,
)
from savedworker.model.record import (
    ActiveNotice,
    CheckpointEntry,
    EventSummary,
    Incarnation,
    Launch,
    Lease,
    State,
    WorkerRecord,
)
from savedworker.model.spec import Volume, WorkerSpec

few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
"""Each example is cheap, and the build machines are small."""

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KEY = "ab" * 32

SPEC = WorkerSpec(
    id="w",
    command=("/bin/true",),
    env={"A": "b"},
    user="1000:1000",
    volumes=(Volume(source="/srv/in", target="/data"),),
    memory=1 << 30,
    cpus=2.0,
    max_migrations=3,
)
RECORD = WorkerRecord(
    id="w",
    created_at=AT,
    state=State.RUNNING,
    lease=Lease(incarnation=2, holder="h", launch="l2", renewal=3, renewed_at=AT),
    incarnations=(
        Incarnation(
            number=1,
            launch="l1",
            instance="i-1",
            zone="z",
            taken_at=AT,
            started_at=AT,
            stopped_at=AT,
            ended_at=AT,
            end_reason="notice",
        ),
        Incarnation(
            number=2,
            launch="l2",
            instance="i-2",
            taken_at=AT,
            started_at=AT,
            restore_from="1-1",
            restored_from="1-1",
            away_seconds=2.0,
        ),
    ),
    launches=(
        Launch(id="l1", requested_at=AT, state="ended", instance="i-1", outcome="used"),
        Launch(id="l2", requested_at=AT, state="accepted", instance="i-2"),
        Launch(id="l3", requested_at=AT, avoid=("z",)),
    ),
    checkpoints=(
        CheckpointEntry(number="1-1", frozen_at=AT, committed_at=AT, bytes_image=9, bytes_uploaded=8),
        CheckpointEntry(number="2-1", frozen_at=AT, committed_at=AT, bytes_image=9, bytes_uploaded=8),
    ),
    notice=ActiveNotice(id="n", source="ec2", received_at=AT, seconds_left=30.0),
    migrations=1,
    events=7,
    recent=(EventSummary(number=7, incarnation=2, at=AT, event="restored", seconds=1.0),),
)
MANIFEST = Manifest(
    worker="w",
    number="1-1",
    incarnation=1,
    cause="periodic",
    frozen_at=AT,
    images=(ImageFile(name="files.img", size=4),),
    packed=StoredFile(name="packed", size=4, chunks=(KEY,)),
    memory=(
        StoredMemory(
            name="pagemap-1.img",
            pages="pages-1.img",
            size=4096,
            groups=(MemoryGroup(key=KEY, windows=(7,)),),
            deltas=(MemoryGroup(key=KEY, windows=(7,)),),
        ),
        StoredMemory(name="shm-1", pages=None, size=4096, groups=(MemoryGroup(key=KEY, windows=(0,)),)),
    ),
    layer=StoredFile(name="layer", size=4, chunks=(KEY,)),
    shm=StoredFile(name="shm", size=4, chunks=(KEY,)),
    log=StreamPosition(stdout=5),
    volume_files=(OpenVolumeFile(path="log", volume="/data", size=3, append=True),),
    runtime=Runtime(hostname="w", masked=("/var/lib/agent",), shm_devices=(77,)),
    fingerprint=Fingerprint(
        machine="x86_64",
        cpu_flags=("sse",),
        criu="4.2",
        runc="1.3",
        mapped_files={"/usr/lib/a.so": "d"},
        gpus=(Gpu(model="m", memory=1, driver="1"),),
    ),
    bytes_image=4,
)

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 62,
    1 << 64,
    10**400,
    -(10**30),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    ".",
    "..",
    "/",
    "/..",
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "\n[x]\x1b[2J",
    "\ud800",
    "$(touch /tmp/pwned); `id` 'x' \"y\" | rm -rf *",
    "٣" * 20,
    "9" * 5000,
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "1-1",
    "1-999999999",
    "0-0",
    "x" * 100_000,
    KEY,
    [],
    {},
    [[]],
    [None],
    ["x"] * 2000,
    [KEY] * 2000,
    {"format": 2},
    {"": ""},
    {"..": "/dev/zero", "/proc/kcore": "1", "//../etc": "2"},
]

anything = st.one_of(
    st.sampled_from(NASTY),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.binary(max_size=10).map(lambda b: b.decode("latin-1")),
)


def places(document: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in ``document``."""
    found = [here] if here else []
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for name, value in inner:
        found += places(value, (*here, name))
    return found


def damaged(good: Any) -> st.SearchStrategy[Any]:
    """``good`` with one to three of its values replaced, removed, added to or said twice."""
    change = st.tuples(
        st.sampled_from(places(good)), st.sampled_from(["replace", "remove", "add", "twice"]), anything
    )

    def apply(changes: list[tuple[tuple[Any, ...], str, Any]]) -> Any:
        document = copy.deepcopy(good)
        for path, how, shared in changes:
            value = copy.deepcopy(shared)
            holder = document
            try:
                for part in path[:-1]:
                    holder = holder[part]
                if how == "remove":
                    del holder[path[-1]]
                elif how == "twice" and isinstance(holder, list):
                    holder.append(copy.deepcopy(holder[path[-1]]))
                elif how == "add" and isinstance(holder[path[-1]], dict):
                    holder[path[-1]]["more"] = value
                elif how == "add" and isinstance(holder[path[-1]], list):
                    holder[path[-1]].append(value)
                else:
                    holder[path[-1]] = value
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took it away
        return document

    return st.lists(change, min_size=1, max_size=3).map(apply)


def encoded(document: Any) -> bytes:
    """JSON as a careless or hostile program writes it: NaN, huge numbers and lone surrogates included."""
    return json.dumps(document).encode()


def plain(model: Any) -> Any:
    """The document of ``model``."""
    return model.model_dump(mode="json")
