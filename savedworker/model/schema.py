"""The published JSON schemas of what other programs read: plain dictionaries, one for each document."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from savedworker.model.base import FORMAT
from savedworker.model.events import Event
from savedworker.model.manifest import Manifest
from savedworker.model.record import WorkerRecord
from savedworker.model.report import Report, Status
from savedworker.model.spec import WorkerSpec

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DOCUMENTS: dict[str, tuple[Any, str]] = {
    "worker-spec": (WorkerSpec, "workers/<id>/spec.json, and what --spec reads."),
    "worker-record": (WorkerRecord, "workers/<id>/record.json."),
    "manifest": (Manifest, "workers/<id>/checkpoints/<incarnation>-<n>/manifest.json."),
    "status": (Status, "One element of the array that `savedworker status --json` prints."),
    "report": (Report, "What `savedworker report --json` prints."),
    "event": (Event, "The member `event` of workers/<id>/events/<incarnation>-<n>.json."),
}


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema by its name, as in ``docs/schema/NAME.schema.json``."""
    return {name: _schema(name, model, where) for name, (model, where) in _DOCUMENTS.items()}


def _schema(name: str, model: Any, where: str) -> dict[str, Any]:
    # A spec is read from people, with defaults; everything else is what we write, with every field there.
    schema = TypeAdapter(model).json_schema(mode="validation" if model is WorkerSpec else "serialization")
    about = f"{where} {schema.get('description', '')}".strip()
    return {**schema, "$schema": _DIALECT, "title": name, "description": f"{about} Format {FORMAT}."}
