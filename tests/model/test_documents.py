"""Documents go to JSON and back unchanged, name their format, and have published schemas that are current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from savedworker.model import events as ev
from savedworker.model.base import FORMAT
from savedworker.model.errors import Corrupt, Refused
from savedworker.model.fingerprint import Fingerprint, Gpu, mismatches
from savedworker.model.manifest import (
    ImageFile,
    Manifest,
    Runtime,
    StoredFile,
    StreamPosition,
    check_checkpoint_number,
    order,
)
from savedworker.model.record import WorkerRecord
from savedworker.model.report import report, status
from savedworker.model.schema import schemas
from savedworker.model.spec import WorkerSpec, parse_spec
from savedworker.store import documents as documents_module
from savedworker.store.documents import dump, load
from tests.model.life import BIRTH, Life
from tests.model.test_transitions import fenced_events

SCHEMAS = Path(__file__).parents[2] / "docs/schema"


def a_life() -> Life:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.pass_time(30)
    life.notice(30)
    life.fenced(ev.Yielded)
    life.run(restore="1-1")
    return life


def a_manifest() -> Manifest:
    stored = StoredFile(name="layer", size=3, chunks=("0" * 64,))
    return Manifest(
        worker="w",
        number="1-1",
        incarnation=1,
        cause="periodic",
        frozen_at=BIRTH,
        images=(ImageFile(name="files.img", size=3),),
        packed=stored,
        layer=stored,
        shm=stored,
        log=StreamPosition(),
        runtime=Runtime(hostname="w"),
        fingerprint=Fingerprint(machine="x86_64", mapped_files={"/lib/é": "d"}),
        bytes_image=3,
    )


def documents() -> dict[str, Any]:
    life = a_life()
    return {
        "worker-spec": parse_spec({"id": "w", "command": ["true"], "env": {"A": "é\n"}}),
        "worker-record": life.record,
        "manifest": a_manifest(),
        "status": status(life.record, life.now),
        "report": report(life.record, [], life.now),
    }


@pytest.mark.parametrize("name", documents())
def test_a_document_comes_back_as_it_was(name: str) -> None:
    document = documents()[name]
    assert load(type(document), dump(document)) == document


@pytest.mark.parametrize("name", documents())
def test_a_document_of_a_newer_format_is_refused_by_name(name: str) -> None:
    document = documents()[name]
    data = json.loads(dump(document)) | {"format": FORMAT + 1, "a_new_field": 1}
    with pytest.raises(Refused, match=rf"x/record.json was written by a newer version .*format {FORMAT + 1}"):
        load(type(document), json.dumps(data).encode(), "x/record.json")


@pytest.mark.parametrize("name", documents())
def test_a_damaged_document_is_not_used(name: str) -> None:
    document = documents()[name]
    data = dump(document)
    for broken in (data[: len(data) // 2], b"", b"[]", b"{}", data.replace(b'"format":1', b'"format":"1"')):
        with pytest.raises(Corrupt):
            load(type(document), broken)


def test_the_published_schemas_are_current() -> None:
    """Run scripts/schema when this fails."""
    there = {x.name.removesuffix(".schema.json"): json.loads(x.read_text()) for x in SCHEMAS.glob("*.json")}
    assert there == schemas()


@pytest.mark.parametrize("name", documents())
def test_documents_agree_with_their_schemas(name: str) -> None:
    schema = schemas()[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    data = json.loads(dump(documents()[name]))
    assert [x.message for x in validator.iter_errors(data)] == []
    assert list(validator.iter_errors({**data, "state": 5, "id": 5, "number": 5}))


def test_events_agree_with_their_schema() -> None:
    validator = jsonschema.Draft202012Validator(schemas()["event"])
    for event in fenced_events(1, "h"):
        data = event.model_dump(mode="json")
        assert [x.message for x in validator.iter_errors(data)] == []
    assert list(validator.iter_errors({"kind": "surprise", "at": "2026-01-01T00:00:00Z"}))


def test_a_schema_says_where_its_document_lies() -> None:
    assert set(schemas()) == {"worker-spec", "worker-record", "manifest", "status", "report", "event"}
    assert all(schema["description"] and schema["title"] == name for name, schema in schemas().items())


def test_a_spec_can_be_written_with_few_fields_and_a_report_has_all() -> None:
    assert schemas()["worker-spec"]["required"] == ["id", "command"]
    assert "lost_seconds" in schemas()["report"]["required"]


def test_a_record_without_the_fields_of_this_version_can_still_be_read() -> None:
    data = json.loads(dump(a_life().record))
    for incarnation in data["incarnations"]:
        del incarnation["restore_from"], incarnation["restores_failed"]
    assert load(WorkerRecord, json.dumps(data).encode()).migrations == 1


@pytest.mark.parametrize(
    "number", ["", "1", "1-", "-1", "0-1", "1-0", "01-1", "1-1-1", "1-1 ", "a-1", "٣-1", "1-1٣", "1-1\n"]
)
def test_a_bad_checkpoint_number_is_refused(number: str) -> None:
    with pytest.raises(Refused, match="is not a checkpoint number"):
        check_checkpoint_number(number)


def test_checkpoints_are_in_the_order_of_numbers_not_of_letters() -> None:
    assert sorted(["2-1", "10-1", "1-10", "1-9"], key=order) == ["1-9", "1-10", "2-1", "10-1"]


# Fingerprints ---------------------------------------------------------------------------------------------------------

GPU = Gpu(model="H100", memory=80 << 30, driver="550.54")
SOURCE = Fingerprint(
    machine="x86_64",
    cpu_flags=("avx", "avx2"),
    criu="4.2.1",
    runc="1.3.6",
    mapped_files={"/lib/c": "1"},
    gpus=(GPU,),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"cpu_flags": ("avx", "avx2", "avx512f")}, None),
        ({"cpu_flags": ("avx",)}, "CPU features missing: avx2"),
        ({"machine": "aarch64"}, "machine type aarch64, not x86_64"),
        ({"criu": "4.3"}, None),
        ({"criu": "4.10.0"}, None),
        ({"criu": "4.2"}, "criu 4.2 is older than 4.2.1"),
        ({"criu": ""}, "criu missing is older than 4.2.1"),
        ({"runc": "1.3.6-rc1"}, None),
        ({"runc": "1.3.5+dev9"}, "runc 1.3.5+dev9 is older than 1.3.6"),
        ({"image": "/other"}, "image /other, not host"),
        ({"mapped_files": {"/lib/c": "2"}}, "/lib/c is another file"),
        ({"mapped_files": {}}, "/lib/c is missing"),
        ({"mapped_files": {"/lib/c": "1", "/lib/d": "1"}}, None),
        ({"gpus": ()}, "other GPUs or GPU driver"),
        ({"gpus": (GPU, GPU)}, "other GPUs or GPU driver"),
        ({"gpus": (GPU.model_copy(update={"driver": "560.1"}),)}, "other GPUs or GPU driver"),
    ],
)
def test_an_instance_fits_or_the_reason_is_named(change: dict[str, Any], reason: str | None) -> None:
    target = SOURCE.model_copy(update=change)
    assert mismatches(SOURCE, target) == ([] if reason is None else [reason])


def test_trailing_zeros_do_not_make_a_version_newer() -> None:
    old = SOURCE.model_copy(update={"criu": "4.2.0"})
    assert mismatches(old, SOURCE.model_copy(update={"criu": "4.2"})) == []


def test_every_document_carries_its_format() -> None:
    assert all(document.format == FORMAT for document in documents().values())
    assert WorkerSpec.model_fields["format"].default == FORMAT


def test_a_document_that_is_too_long_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = a_manifest()
    length = len(dump(manifest))
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", length)
    assert load(Manifest, dump(manifest)) == manifest
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", length - 1)
    with pytest.raises(Refused, match=rf"Manifest would be too long for a document \({length} bytes\)"):
        dump(manifest)
