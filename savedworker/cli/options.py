"""Options and argument types that several verbs share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import click

from savedworker.cli.exit_status import BadArgument
from savedworker.controller.client import Client
from savedworker.fleet import base
from savedworker.model import defaults
from savedworker.model.errors import Refused
from savedworker.model.spec import check_worker_id
from savedworker.model.units import parse_duration, parse_size
from savedworker.store.backend import open_store
from savedworker.store.sealing import Sealing

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Parsed = TypeVar("Parsed")


def duration(text: str) -> float:
    """An argument type: seconds, written as ``30s``, ``5m`` or a bare number."""
    return _checked(parse_duration, text)


def size(text: str) -> int:
    """An argument type: bytes, written as ``512MiB``, ``4GiB`` or a bare number."""
    return _checked(parse_size, text)


def worker_id(text: str) -> str:
    """An argument type: the id of a worker."""
    return _checked(check_worker_id, text)


def _checked(parse: Callable[[str], Parsed], text: str) -> Parsed:
    try:
        return parse(text)
    except Refused as error:
        raise click.BadParameter(f"{error.message}; {error.fix}") from error


def store_option(command: Decorated) -> Decorated:
    """``--store URL``."""
    return click.option(
        "--store",
        metavar="URL",
        help="Where everything durable is: s3://, gs://, file:// or a directory. "
        "Default: $SAVEDWORKER_STORE, else $XDG_DATA_HOME/savedworker/store.",
    )(command)


def json_option(command: Decorated) -> Decorated:
    """``--json``, as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Results and errors as JSON.")(command)


def default_store() -> str:
    """The store's URL or directory when none is given."""
    if given := os.environ.get("SAVEDWORKER_STORE"):
        return given
    data = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification says to ignore a relative path.
    home = Path(data) if Path(data).is_absolute() else Path.home() / ".local/share"
    return str(home / "savedworker/store")


def open_client(store: str | None, sealing: Sealing | None = None) -> Client:
    """A client of ``store``, or of the default one, with the environment's keys. Nothing is contacted yet. Raises BadArgument."""
    url = default_store() if store is None else store
    try:
        opened = open_store(url, timeout=defaults.STORE_TIMEOUT, sealing=sealing)
    except Refused as error:
        raise BadArgument(error.message, error.fix) from error
    if opened.url.startswith("file://"):
        path = Path(unquote(opened.url.removeprefix("file://")))
        if path.exists() and not path.is_dir():
            raise BadArgument(f"the store {path} is not a directory", "give a directory for --store")
    return Client(opened, fleets=get_fleet)


def get_fleet(name: str) -> base.Fleet:
    """The fleet of that name. Raises Refused."""
    return base.get_fleet(name)


def print_id(worker: str, as_json: bool) -> None:
    """The id alone, or ``{"id": …}``."""
    click.echo(json.dumps({"id": worker}) if as_json else worker)
