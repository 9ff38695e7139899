"""The command group: registers the verbs, and turns every error into one line (or JSON object) and an exit status."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from savedworker import __version__
from savedworker.cli import agent, bench, change, controller, doctor, gc, logs, run, show, unbuilt, wait
from savedworker.cli.exit_status import BAD_ARGUMENTS, OTHER, OTHER_OF_RUN, BadArgument
from savedworker.model.errors import BadSpec, SavedWorkerError

# What the packages below have to say goes where a verb sends it, never to stderr unasked.
logging.getLogger("savedworker").addHandler(logging.NullHandler())

EPILOG = """\b
Exit status: 0; 2 for bad arguments or a bad spec file; 1 for other errors.
run and wait: the worker's own exit code (128+n for signal n), 124 when
--timeout runs out, 125 for everything else. See docs/cli.md."""


class Application(click.Group):
    """The ``savedworker`` command."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Run the command line ``args`` and exit. Never shows a traceback, unless SAVEDWORKER_DEBUG is set."""
        words = list(sys.argv[1:] if args is None else args)
        sys.exit(self._run(words, extra.get("prog_name") or "savedworker"))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of a worker's life, not of the alphabet."""
        return list(self.commands)

    def _run(self, words: list[str], name: str) -> int:
        as_json = "--json" in words[: words.index("--") if "--" in words else None]
        verb = next((word for word in words if not word.startswith("-")), "")
        otherwise = OTHER_OF_RUN if verb in ("run", "wait") else OTHER
        try:
            status = super().main(args=words or ["--help"], prog_name=name, standalone_mode=False)
            sys.stdout.flush()
            return status if isinstance(status, int) else 0
        except BrokenPipeError:
            _forget_stdout()
            return otherwise
        except click.Abort:
            _complain("interrupted", "interrupted", "", as_json)
            return 128 + signal.SIGINT
        except click.ClickException as error:
            fix = f"see {name} {verb} --help" if verb in self.commands else f"see {name} --help"
            _complain("usage", _words(error).rstrip("."), fix, as_json)
            return BAD_ARGUMENTS
        except SavedWorkerError as error:
            _complain(error.code, error.message, error.fix, as_json)
            return BAD_ARGUMENTS if isinstance(error, BadSpec | BadArgument) else otherwise
        except Exception as error:  # the last place where a person can be told in one line
            if os.environ.get("SAVEDWORKER_DEBUG"):
                raise
            text = f"unexpected {type(error).__name__}: {error}".splitlines()[0]
            _complain("internal", text, "set SAVEDWORKER_DEBUG=1 to see where, and report it", as_json)
            return otherwise


def _words(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        # Options that are only there to be refused are no suggestion.
        hidden = {o for p in error.ctx.command.params if getattr(p, "hidden", False) for o in p.opts}
        seen = [word for word in error.possibilities or () if word not in hidden]
        return click.NoSuchOption(error.option_name, possibilities=seen, ctx=error.ctx).format_message()
    return error.format_message()


def _complain(code: str, message: str, fix: str, as_json: bool) -> None:
    if as_json:
        line = json.dumps({"code": code, "message": message, "fix": fix}, ensure_ascii=False)
    else:
        line = " ".join(f"savedworker: {SavedWorkerError(message, fix)}".split())
    click.echo(line, err=True)


def _forget_stdout() -> None:
    """Nobody reads our output any more: keep Python from complaining of that when it flushes at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


@click.group(
    cls=Application,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="savedworker", message="%(prog)s %(version)s")
def cli() -> None:
    """Run process trees that outlive the machine they run on."""


for command in (
    run.run,
    run.submit,
    show.status,
    show.list_workers,
    wait.wait,
    logs.logs,
    show.report,
    change.checkpoint,
    change.preempt,
    change.cancel,
    doctor.doctor,
    bench.bench,
    gc.gc,
    controller.controller,
    agent.agent,
    *unbuilt.COMMANDS,
):
    cli.add_command(command)


def main() -> None:
    """The entry point of the ``savedworker`` program."""
    cli.main()
