"""``savedworker logs``: what a worker has written so far, or as it writes."""

from __future__ import annotations

import json
import sys
import time

import click

from savedworker.cli.options import json_option, open_client, store_option, worker_id
from savedworker.cli.relay import POLL, SLOWEST_POLL, STREAMS, Sink, piece_bytes, pieces_after
from savedworker.model.errors import Temporary
from savedworker.store.logs import Cursor, LogPiece, Mark, render_mark


@click.command()
@click.argument("worker", metavar="ID", type=worker_id)
@click.option("-f", "--follow", is_flag=True, help="Go on until the worker has ended and everything is read.")
@click.option("--stream", type=click.Choice(STREAMS), help="Only this one.")
@store_option
@json_option
def logs(worker: str, follow: bool, stream: str | None, store: str | None, as_json: bool) -> None:
    """Print what a worker wrote.

    Its stdout comes out on stdout, its stderr on stderr.

    A line beginning with [savedworker] marks where output was discarded and is repeated, where no last checkpoint was taken.
    With --json each piece is one JSON object on stdout: stream, text, cursor and, for a mark, mark.
    """
    client = open_client(store)
    record = client.record(worker)
    sinks = {"stdout": Sink(sys.stdout.buffer), "stderr": Sink(sys.stderr.buffer)}
    cursors: dict[str, Cursor | None] = dict.fromkeys([stream] if stream else STREAMS)
    pause = POLL
    while True:
        # Everything a worker wrote is in the store before its lease is released: look at the record first.
        last = not follow or (record.state.terminal and not record.lease_held)
        found = False
        try:
            for name, cursor in cursors.items():
                for piece in pieces_after(client, worker, name, cursor):
                    if as_json:
                        sinks["stdout"].write(_json(name, piece))
                    else:
                        _write(sinks, name, piece_bytes(piece))
                    cursors[name], found = piece.cursor, True
            if last:
                return
            pause = POLL if found else min(pause * 1.5, SLOWEST_POLL)
            time.sleep(pause)
            record = client.record(worker)
        except Temporary:
            if not follow:
                raise
            time.sleep(SLOWEST_POLL)


def _write(sinks: dict[str, Sink], name: str, data: bytes) -> None:
    try:
        sinks[name].write(data)
    except BrokenPipeError:
        if name == "stdout":
            raise


def _json(stream: str, piece: LogPiece) -> bytes:
    document: dict[str, object] = {"stream": stream, "cursor": str(piece.cursor)}
    if isinstance(piece, Mark):
        document["mark"] = render_mark(piece)
    else:
        document["text"] = piece.data.decode(errors="surrogateescape")
    return json.dumps(document).encode() + b"\n"
