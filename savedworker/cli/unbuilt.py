"""What the stable command line names and this version does not do yet: out of the help, refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import click

from savedworker.cli.exit_status import BadArgument

_VERBS = {
    "bridge": "use submit, status and cancel with --json for now",
}


def not_built(what: str, instead: str) -> BadArgument:
    """The refusal of ``what``."""
    return BadArgument(f"{what} is not built yet", instead)


def _refuse(verb: str) -> Callable[[tuple[str, ...]], None]:
    def refuse(words: tuple[str, ...]) -> None:
        raise not_built(f"savedworker {verb}", _VERBS[verb])

    return refuse


def _command(verb: str) -> click.Command:
    return click.Command(
        verb,
        callback=_refuse(verb),
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        add_help_option=False,
        hidden=True,
    )


COMMANDS = [_command(verb) for verb in _VERBS]
