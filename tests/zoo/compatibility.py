"""Writes docs/compatibility.md from a run of the whole zoo: nothing stands there that was not seen in that run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from savedworker.checkpoint import seccomp, tools
from tests.zoo.zoo import EXTRA, NEEDS, ZOO, Animal, FallsBack, Refused, Survives

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

HEAD = """# Compatibility: what survives a move, and what is refused

Written by `scripts/compatibility` from runs of the zoo (`tests/zoo`) on {date}: every line was seen there. *Survives* means three
moves in a row of one worker: with notice, without notice from a checkpoint that was asked for, with notice; the program checks its
own state before, between and after, and ends well. *Refused* means named beforehand by pid and descriptor (`savedworker status`,
`unprotected_reasons`), the checkpoint refused with that reason, and the worker running on undisturbed.

The machine: {machine}.

"""

NOTES = """
## Notes

- **Interrupted calls.** `nanosleep`, and `poll` and `epoll_wait` with a time limit, may return `EINTR` although no handler ran, when
  a checkpoint is taken; signal(7) allows it, and `SIGSTOP` and `SIGCONT` do the same. Python, Java, Node and bash try again by
  themselves; a C program has to. Calls that wait without a limit or until a fixed time go on undisturbed.
- **A unix connection that waits to be accepted with data in it** is in the way of a checkpoint, which is tried again.
- **Clocks.** The monotonic clock stands still while a worker is away, the wall clock does not. `/.savedworker/migrations.json` tells
  how long it was.
- **Connections that leave the worker** end with an error at both ends when it moves, and never by a checkpoint alone. A connection
  inside the worker that its listener has not accepted yet is closed as well: the client gets `ECONNABORTED` at once.
- **System calls that answer as on an older kernel** (`syscalls: guarded`, the default): {calls} and `clone3` answer `ENOSYS`, new user
  namespaces `EPERM`, multipath TCP `EPROTONOSUPPORT`. Their state could not be saved, or would be lost without a word. With
  `syscalls: all` they go through: what can be seen of them is refused by name, but a Landlock sandbox, protection keys of memory and
  kernel keyrings cannot be seen, and are gone after a move.
- **Memory.** After a move a mapping is not sealed any more (`mseal`), and one that may be dropped (`MAP_DROPPABLE`) is an ordinary one.
"""


def main(results: str) -> int:
    """Write the page from the ``results`` of the tests; the number of animals that did not do what is expected of them."""
    seen, begun = {}, set()
    for line in Path(results).read_text().splitlines():
        entry = json.loads(line)
        if "seconds" in entry:
            seen[entry["name"]] = entry
            begun.discard(entry["name"])
        else:
            seen.pop(entry["name"], None)
            begun.add(entry["name"])
    missing = [a for a in ZOO if a.name not in seen]
    calls = ", ".join(f"`{name}`" for name in seccomp.UNSAVEABLE)
    text = HEAD.format(date=f"{datetime.now(UTC):%Y-%m-%d}", machine=_machine())
    text += _survivors([a for a in ZOO if not isinstance(a.expected, Refused)], seen)
    text += _refused([a for a in ZOO if isinstance(a.expected, Refused)], seen)
    if missing:
        text += "\n## Not seen in this run\n\n" + "".join(f"- {a.shows}: {_why(a, begun)}\n" for a in missing)
    PAGE.write_text(text + NOTES.format(calls=calls))
    print(f"compatibility: {PAGE}: {len(seen)} seen, {len(missing)} not")
    return sum(not a.needs or NEEDS[a.needs]() for a in missing)


def _why(animal: Animal, begun: set[str]) -> str:
    if animal.needs and not NEEDS[animal.needs]():
        return f"{animal.needs} was not on the machine"
    return "**failed**" if animal.name in begun else "not run"


def _survivors(animals: list[Animal], seen: dict[str, dict]) -> str:
    lines = ["## What survives\n", "| what | seen | note |", "|---|---|---|"]
    for animal in animals:
        entry = seen.get(animal.name)
        if entry is None:
            continue
        result = "survives three moves" if animal.moves == 3 else f"survives {animal.moves} moves"
        notes = [animal.note] if animal.note else []
        if isinstance(animal.expected, FallsBack):
            result = f"falls back, {result}"
        if isinstance(animal.expected, Survives) and entry["forgotten"]:
            notes.append(f"Forgotten: {', '.join(entry['forgotten'])}.")
        lines.append(f"| {animal.shows} | {result} | {' '.join(notes)} |")
    return "\n".join(lines) + "\n"


def _refused(animals: list[Animal], seen: dict[str, dict]) -> str:
    lines = [
        "\n## What is refused by name\n",
        "| what | the reason as it was told | what to do |",
        "|---|---|---|",
    ]
    for animal in animals:
        if animal.name in seen and isinstance(animal.expected, Refused):
            lines.append(f"| {animal.shows} | {seen[animal.name]['reason']} | {animal.expected.workaround} |")
    return "\n".join(lines) + "\n"


def _machine() -> str:
    found = tools.find_tools()
    parts = [
        f"Linux {platform.release()} on {platform.machine()}",
        f"{os.cpu_count()} CPUs",
        _os(),
        f"CRIU {found.criu_version}",
        f"runc {found.runc_version}",
    ]
    for name, *command in (
        ("Python", "/usr/bin/python3", "--version"),
        ("", "java", "-version"),
        ("Node", "node", "--version"),
        ("", "Rscript", "--version"),
        ("PyTorch", sys.executable, "-c", "import torch; print(torch.__version__)"),
        ("uvloop", sys.executable, "-c", "import uvloop; print(uvloop.__version__)"),
        ("JAX", str(EXTRA / "bin/python"), "-c", "import jax; print(jax.__version__)"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            continue
        words = (done.stdout or done.stderr).splitlines()[0].strip().removeprefix("Python ").replace('"', "")
        parts.append(f"{name} {words}".strip())
    return ", ".join(parts)


def _os() -> str:
    names = dict(line.partition("=")[::2] for line in Path("/etc/os-release").read_text().splitlines())
    return names.get("PRETTY_NAME", "").strip('"')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)
