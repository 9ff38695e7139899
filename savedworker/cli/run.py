"""``savedworker run`` and ``savedworker submit``: one set of options, in the foreground and in the background."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from savedworker.cli.background import start_controller
from savedworker.cli.build_spec import SpecOptions, build_spec
from savedworker.cli.exit_status import BadArgument
from savedworker.cli.follow import Detached, Follower
from savedworker.cli.options import Decorated, json_option, open_client, print_id, size, store_option
from savedworker.controller.client import Client
from savedworker.model.errors import Fatal, SavedWorkerError, Temporary

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND …"),
    click.option("--name", metavar="ID", help="The worker's id. Default: made from the command."),
    store_option,
    click.option(
        "--fleet", metavar="NAME", help="Where instances come from. Default: local, hosts on this machine."
    ),
    click.option("--spec", metavar="FILE", help="A YAML or JSON spec, - for stdin; see docs/spec.md."),
    click.option(
        "--checkpoint-interval",
        metavar="5m|auto|off",
        help="Time between periodic checkpoints; auto: as a notice needs it. Default: 5m. A notice always takes one.",
    ),
    click.option("--max-migrations", type=click.IntRange(min=0), metavar="N", help="Default: unlimited."),
    click.option(
        "--volume",
        "volumes",
        multiple=True,
        metavar="SRC:DST[:ro]",
        help="A path of the instance's, seen inside. Not in checkpoints.",
    ),
    click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="URL:PATH",
        help="Fetched into the worker's files before its first start: s3://, gs:// or file://; a slash at the end means all below.",
    ),
    click.option(
        "--output",
        "outputs",
        multiple=True,
        metavar="PATH:URL",
        help="A file or folder of the worker's, published there once, when it has succeeded.",
    ),
    click.option(
        "--env", multiple=True, metavar="K[=V]", help="A variable for the worker; without =V, the caller's."
    ),
    click.option("--memory", type=size, metavar="4GiB", help="Limit; past it the worker is killed (oom)."),
    click.option(
        "--cpus", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Limit, may be a fraction."
    ),
    click.option("--gpus", hidden=True),
    click.option("--user", metavar="U[:G]", help="Default: root inside."),
    click.option(
        "--network",
        type=click.Choice(["private", "host"]),
        help="Default: private, the same inner address on every instance.",
    ),
    click.option(
        "--credentials",
        type=click.Choice(["none", "instance"]),
        help="AWS credentials for the worker: those of whatever instance it is on. Default: none.",
    ),
    click.option(
        "--image",
        metavar="host|DIR|oci:DIR[:TAG]|docker://REF",
        help="The root file system. Default: host, the instance's own.",
    ),
    json_option,
]


def _spec_options(command: Decorated) -> Decorated:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


# After the first word of COMMAND nothing is an option of ours, with or without the --.
_CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}


@click.command(context_settings=_CONTEXT)
@_spec_options
@click.option(
    "--report",
    "report_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the report here at the end, as JSON.",
)
def run(store: str | None, as_json: bool, report_file: str | None, **given: Any) -> None:
    """Run COMMAND as a worker, in the foreground.

    Its stdout and stderr come out on ours. Ctrl-C cancels the worker; a second Ctrl-C, SIGTERM or a closed
    stdout leaves it running. Running the same --name with the same options again follows it anew. Exits with the
    worker's code; with --json the last line on stderr is the report, or the error.
    """
    if report_file is not None and not os.access(Path(report_file).absolute().parent, os.W_OK):
        raise BadArgument(
            f"--report {report_file} cannot be written", "choose a directory that is there and writable"
        )
    client, worker, local = _create(store, given)
    follower = Follower(client, worker, quiet=as_json)
    try:
        ended = follower.follow()
    except (Detached, Temporary) as error:
        fix = _leave(client, worker, local)
        raise Detached(f"{error.message}; worker {worker} goes on", fix) from error
    finally:
        if not follower.stderr.at_line_start:
            click.echo(err=True)  # what we say ourselves from here on is on lines of its own
    if not ended.settled:
        _leave(client, worker, local)
    try:
        _report(client, worker, as_json, report_file)
    except (SavedWorkerError, OSError) as error:
        # The worker's own end is the answer, also where it cannot be told in full.
        known = (
            error
            if isinstance(error, SavedWorkerError)
            else Fatal(f"the report could not be written: {error}")
        )
        click.echo(json.dumps(known.to_json()) if as_json else f"savedworker: {known}", err=True)
    click.get_current_context().exit(ended.exit_status)


def _report(client: Client, worker: str, as_json: bool, file: str | None) -> None:
    if as_json or file is not None:
        document = client.report(worker).model_dump(mode="json")
        if file is not None:
            Path(file).write_text(json.dumps(document, indent=2) + "\n")
        if as_json:
            click.echo(json.dumps(document, ensure_ascii=False), err=True)


@click.command(context_settings=_CONTEXT)
@_spec_options
def submit(store: str | None, as_json: bool, **given: Any) -> None:
    """Start COMMAND as a worker and return; prints its id.

    A controller in the background brings the worker on when its fleet is on this machine; for other fleets keep a
    `savedworker controller` running, or `savedworker wait`.
    """
    client, worker, local = _create(store, given)
    try:
        client.reconcile(worker)
    except Temporary:
        if not local:
            raise
    if local:
        start_controller(client.store.url, worker)
    print_id(worker, as_json)


def _create(store: str | None, given: dict[str, Any]) -> tuple[Client, str, bool]:
    unbuilt = {"gpus": given.pop("gpus")}
    try:
        cwd = Path.cwd()
    except OSError as error:
        raise BadArgument(
            f"the current directory is gone ({error.strerror})", "change to one that is there"
        ) from error
    spec, fleet = build_spec(SpecOptions(**given, unbuilt=unbuilt), os.environ, cwd)
    if spec.image == "host" and fleet.embedded and spec.workdir == "/" != str(cwd) and given["spec"] is None:
        note = f"{cwd} is on a file system of its own, which the worker does not see; it begins in /"
        # What the worker has of its own, as /dev/shm, is no volume either.
        hint = (
            ""
            if cwd.is_relative_to("/dev") or cwd.is_relative_to("/proc")
            else f" (add --volume {cwd}:{cwd} to work there)"
        )
        click.echo(f"savedworker: {note}{hint}", err=True)
    client = open_client(store)
    return client, client.submit(spec), fleet.embedded


def _leave(client: Client, worker: str, local: bool) -> str:
    """Have somebody else bring the worker on. Returns how to follow it."""
    store = client.store.url
    follow = f"follow it with: savedworker logs -f {worker} --store {store}"
    if not local:
        return follow + f"; keep a controller running: savedworker controller --store {store}"
    try:
        start_controller(store, worker)
    except SavedWorkerError as error:
        return error.fix
    return follow
