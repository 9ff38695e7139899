"""Spec, record, manifest, event and the agent's own notes: any bytes give a document that can be used, or a typed error."""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_provider_savedworker.follow import Position
from savedworker.agent import attachment
from savedworker.checkpoint import bundle
from savedworker.checkpoint.container import first_runtime
from savedworker.checkpoint.restore import check_runtime
from savedworker.cli.spec_file import read_spec_file
from savedworker.fleet.local.host import HostDir, HostRecord
from savedworker.fleet.local.process import ProcessId
from savedworker.model import events as ev
from savedworker.model.decisions import InstanceView, Observations, decide, may_take
from savedworker.model.errors import BadSpec, Corrupt, Refused, SavedWorkerError
from savedworker.model.fingerprint import mismatches
from savedworker.model.manifest import Manifest
from savedworker.model.record import WorkerRecord
from savedworker.model.report import report
from savedworker.model.spec import WorkerSpec, parse_spec
from savedworker.store.backend import open_store
from savedworker.store.documents import dump, load
from savedworker.store.worker import StoredEvent, WorkerStore
from tests.hostile.material import AT, KEY, MANIFEST, RECORD, SPEC, anything, damaged, encoded, few, plain

EVENT = StoredEvent(incarnation=1, n=3, event=ev.Started(at=AT, incarnation=1, holder="h", seconds=1.0))
BOMBS = [
    b"",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"format":1' + b',"a":1' * 1000 + b"}",
    b'{"format":' + b"9" * 10_000 + b"}",
    b'{"format":1e999}',
    b'{"format":true}',
    b"\xff\xfe\x00",
    b'{"format":1}' * 2,
]


def loaded(kind: Any, data: bytes) -> Any:
    """The document, or None where it was refused; every other error fails the test."""
    try:
        return load(kind, data)
    except (Corrupt, Refused):
        return None


@pytest.mark.parametrize("kind", [WorkerSpec, WorkerRecord, Manifest, StoredEvent])
@pytest.mark.parametrize("data", BOMBS, ids=range(len(BOMBS)))
def test_what_is_no_document_is_refused_in_no_time(kind: Any, data: bytes) -> None:
    with pytest.raises((Corrupt, Refused)):
        load(kind, data)


@few
@given(damaged(plain(SPEC)))
@example({**plain(SPEC), "memory": 10**30})
@example({**plain(SPEC), "cpus": 1e300})
@example({**plain(SPEC), "lease_term": 1e300})
@example({**plain(SPEC), "user": "9999999999"})
def test_a_spec_is_refused_by_name_or_gives_a_container(document: Any) -> None:
    try:
        spec = parse_spec(document)
    except BadSpec as error:
        assert "\n" not in error.message  # noqa: PT017 either way is right
        return
    assert load(WorkerSpec, dump(spec)) == spec
    paths = bundle.BundlePaths(Path("/r"), Path("/s"), None, Path("/c"), None, "/g")
    found = bundle.configuration(spec, first_runtime(spec), (0, 0, [], "/"), paths)
    resources = found["linux"]["resources"]
    assert 0 <= resources.get("memory", {"limit": 0})["limit"] < 1 << 63
    assert 0 <= resources.get("cpu", {"quota": 0})["quota"] < 1 << 63
    assert AT + timedelta(seconds=spec.lease_term) > AT


@few
@given(
    st.one_of(
        damaged(plain(SPEC)).map(encoded), st.binary(max_size=300), st.text(max_size=200).map(str.encode)
    )
)
@example(b"a: &a [*a, *a]")
@example(
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 9)) for i in range(98, 110))
)
@example(b"!!python/object/apply:os.system ['touch /tmp/pwned']")
@example(b"[" * 1000)
@example(b"{" * 1000)
@example(b"? " * 3000)
@example(b"<<: [*x]")
@example(b"id: w\ncommand: [a]\nenv: {<<: 1}")
@example(b"id: w\ncommand: [a]\nvolumes: ['a:b:c:d', ':', 'x']\nmemory: 1e400")
def test_a_spec_file_of_any_bytes_gives_fields_or_names_the_fault(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("spec") / "spec.yaml"
    path.write_bytes(data)
    with contextlib.suppress(Refused):
        parse_spec(read_spec_file(str(path)), str(path))


def test_a_spec_file_that_never_ends_is_not_read_for_ever() -> None:
    with pytest.raises(BadSpec, match="longer than"):
        read_spec_file("/dev/zero")


@few
@given(damaged(plain(RECORD)))
@example({**plain(RECORD), "created_at": "0001-01-01T00:00:00+23:59"})
@example({**plain(RECORD), "exit_code": 10**30})
@example({**plain(RECORD), "checkpoints": [{**plain(RECORD)["checkpoints"][0], "number": "../../x"}]})
def test_a_record_is_refused_or_can_be_decided_on_and_shown(document: Any) -> None:
    record = loaded(WorkerRecord, encoded(document))
    if record is None:
        return
    for spec in (SPEC, SPEC.model_copy(update={"max_migrations": 0})):
        for silent in (0.0, 1e6):
            seen = Observations({x.id: InstanceView("ended") for x in record.launches[:1]}, silent, 1e6)
            decide(record, spec, seen, AT + timedelta(seconds=5))
            may_take(record, spec, "l3", silent)
    report(record, record.recent, AT).model_dump_json()
    assert load(WorkerRecord, dump(record)) == record


@few
@given(damaged(plain(EVENT)))
def test_an_event_is_refused_or_comes_back_as_it_was(document: Any) -> None:
    event = loaded(StoredEvent, encoded(document))
    assert event is None or load(StoredEvent, dump(event)) == event


@few
@given(damaged(plain(MANIFEST)))
@example({**plain(MANIFEST), "bytes_image": 10**400})
def test_a_manifest_is_refused_or_names_only_plain_files_and_this_workers_container(document: Any) -> None:
    manifest = loaded(Manifest, encoded(document))
    if manifest is None:
        return
    names = [x.name for x in (*manifest.images, manifest.packed, manifest.layer, manifest.shm)]
    names += [name for x in manifest.memory for name in (x.name, x.pages) if name is not None]
    for name in names:
        assert "/" not in name
        assert "\0" not in name
        assert name not in (".", "..")
        assert len(name) < 200
    assert all(len(key) == 64 for key in manifest.chunk_keys())
    mismatches(manifest.fingerprint, MANIFEST.fingerprint)
    mismatches(MANIFEST.fingerprint, manifest.fingerprint)
    try:
        check_runtime(manifest, SPEC)
    except Corrupt:
        return
    assert manifest.runtime.hostname == "w"
    assert (manifest.runtime.network, manifest.runtime.syscalls) == (SPEC.network, SPEC.syscalls)
    assert all(x.startswith("/") and ".." not in x.split("/") for x in manifest.runtime.masked)


@pytest.mark.parametrize(
    "changes",
    [
        {"hostname": "../../etc"},
        {"hostname": "w\n6.6.6.6 bank"},
        {"network": "host"},
        {"syscalls": "all"},
        {"masked": ["/"]},
        {"masked": ["/usr/../.."]},
        {"masked": ["relative"]},
    ],
    ids=str,
)
def test_a_manifest_cannot_ask_for_another_container_than_the_spec(changes: dict[str, Any]) -> None:
    runtime = MANIFEST.runtime.model_copy(update=changes)
    with pytest.raises(Corrupt):
        check_runtime(MANIFEST.model_copy(update={"runtime": runtime}), SPEC)


def test_another_workers_documents_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    mine, other = WorkerStore(store, "w"), WorkerStore(store, "other")
    other.create_spec(SPEC.model_copy(update={"id": "other"}))
    other.create_record(RECORD.model_copy(update={"id": "other"}))
    other.publish_manifest(MANIFEST.model_copy(update={"worker": "other"}))
    for name in ("spec.json", "checkpoints/1-1/manifest.json"):
        store.put(f"workers/w/{name}", store.get(f"workers/other/{name}").data)
    store.swap("workers/w/record.json", store.get("workers/other/record.json").data, None)
    for read in (mine.load_spec, mine.load_record, lambda: mine.load_manifest("1-1")):
        with pytest.raises(Corrupt):
            read()
    with pytest.raises(Corrupt):
        mine.publish_manifest(MANIFEST.model_copy(update={"worker": "other"}))
    for number in ("../other", "1-1/../..", "1-1\n", "١-١", "-1", ""):
        with pytest.raises(SavedWorkerError):
            mine.load_manifest(number)


@few
@given(damaged(plain(attachment.Attachment(incarnation=1, holder="h", runtime=MANIFEST.runtime))))
def test_an_attachment_that_cannot_be_read_is_none(tmp_path_factory: Any, document: Any) -> None:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "attachment.json").write_bytes(encoded(document))
    found = attachment.load(folder)
    assert found is None or found.runtime.hostname is not None
    (folder / "attachment.json").write_bytes(b"[" * 100_000)
    assert attachment.load(folder) is None


HOST = HostRecord(
    launch="w-1",
    worker="w",
    instance="host-0a01",
    zone="local-a",
    address="198.18.0.9",
    boot="b",
    created="2026-01-01T00:00:00+00:00",
    agent_command=("true",),
    restart_pause=1.0,
    restart_limit=3,
    daemon=ProcessId(12345, 1),
)


@few
@given(damaged(json.loads(json.dumps(HOST.to_json()))))
@example({**HOST.to_json(), "instance": "host-../../x"})
@example({**HOST.to_json(), "address": "198.18.0.9/0"})
@example({**HOST.to_json(), "daemon": {"pid": 1, "start": 0}})
@example({**HOST.to_json(), "launch": "another"})
@example({**HOST.to_json(), "address": True})
def test_a_damaged_host_record_is_none_or_names_one_hosts_own_things(
    tmp_path_factory: Any, document: Any
) -> None:
    host = HostDir(tmp_path_factory.mktemp("hosts") / "w-1")
    host.path.mkdir()
    (host.path / "host.json").write_bytes(encoded(document))
    (host.path / "ended.json").write_bytes(encoded(document))
    found = host.record()
    assert host.ended() is None
    if found is not None:
        assert found.launch == "w-1"
        assert "/" not in found.instance
        assert " " not in found.address
        assert found.cgroup.count("/") == 2
        assert ".." not in found.cgroup
        assert found.daemon is None or found.daemon.pid > 1
        assert found.daemon_alive in (True, False)


@few
@given(
    st.one_of(
        damaged(
            {
                "format": 1,
                "outcome": "gone",
                "detail": "x",
                "at": "2026-01-01T00:00:00+00:00",
                "cleaned": True,
            }
        ),
        anything,
    )
)
def test_a_damaged_tombstone_is_none_or_has_a_time(tmp_path_factory: Any, document: Any) -> None:
    host = HostDir(tmp_path_factory.mktemp("hosts") / "w-1")
    host.path.mkdir()
    (host.path / "ended.json").write_bytes(encoded(document))
    found = host.ended()
    assert found is None or found.outcome in ("gone", "failed")


POSITION = {
    "format": 1,
    "writer": "x",
    "events": 3,
    "streams": {"stdout": {"cursor": "1:5", "partial": "YWI="}},
}


@few
@given(damaged(POSITION))
@example({**POSITION, "streams": {"stdout": {"cursor": "junk", "partial": ""}}})
@example({**POSITION, "streams": {"stdout": {"cursor": "1:5", "partial": "not base64!"}}})
@example({**POSITION, "events": -5})
def test_the_position_of_an_airflow_task_never_stops_the_task_from_following(
    tmp_path_factory: Any, document: Any
) -> None:
    """``Follower._load`` is what reads it; here on a real store, with a worker that has said one line."""
    from airflow_provider_savedworker.follow import Follower
    from savedworker.controller.client import Client
    from savedworker.store import logs

    folder = tmp_path_factory.mktemp("store")
    client = Client(f"file://{folder}", fleets=lambda _: None)  # type: ignore[arg-type,return-value]
    worker = WorkerStore(client.store, "w")
    worker.create_spec(SPEC)
    worker.create_record(RECORD)
    logs.LogWriter(worker, "stdout", 1, 0).append(b"hello\n")
    client.store.put("workers/w/engine/airflow.json", encoded(document))
    said: list[str] = []
    follower = Follower(client, "w", lambda _level, _stream, text: said.append(text), only_looks=True)
    step = follower.step()
    assert step.trouble is None, said
    Position.model_validate_json(client.store.get("workers/w/engine/airflow.json").data)


def test_keys_of_chunks_are_never_paths() -> None:
    for key in ("../x", "/etc/passwd", KEY.upper(), KEY[:-1] + "\n", KEY + "\n", "٣" * 64):
        with pytest.raises(Corrupt):
            load(
                Manifest, encoded({**plain(MANIFEST), "layer": {"name": "layer", "size": 1, "chunks": [key]}})
            )
