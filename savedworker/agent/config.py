"""What an agent is told when its instance boots."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from savedworker.model import defaults
from savedworker.model.budget import choose_budget
from savedworker.model.errors import Refused
from savedworker.model.spec import WorkerSpec
from savedworker.model.units import parse_size


@dataclass(frozen=True)
class AgentConfig:
    """One agent: which worker, for which launch, on which instance, with which private directory."""

    store: str
    worker: str
    launch: str
    fleet: str
    instance: str
    zone: str | None
    state_dir: Path
    instance_type: str | None = None
    cgroup_parent: str = "/savedworker"
    metadata: str = "http://169.254.169.254"
    sigterm_grace: float = defaults.GRACE_SIGTERM
    """Seconds between SIGTERM and SIGKILL on this instance."""
    key_files: tuple[Path, ...] = ()
    """Files on this instance that hold keys of the store."""

    @property
    def notice(self) -> float:
        """Seconds of warning that can be relied on: a checkpoint that takes longer does not protect the worker."""
        return defaults.NOTICE.get(self.fleet, self.sigterm_grace)

    @property
    def private_folders(self) -> tuple[Path, ...]:
        """What no worker may see of this instance's disk: the agent's folder (of every local host), a store on it, and keys."""
        own = self.state_dir.parents[2] if self.fleet == "local" else self.state_dir
        store = self.store.removeprefix("file://")
        return (own, *([Path(store)] if store.startswith("/") else []), *hiding_places(self.key_files))


MEMORY_BUDGET = "SAVEDWORKER_MEMORY_BUDGET"
"""Environment variable of an instance: the memory that its agent may use beside the worker, as ``512MiB``."""


def memory_budget(spec: WorkerSpec, environ: Mapping[str, str]) -> int:
    """Bytes that the agent may use for ``spec``'s checkpoints here. Raises Refused for what is no size, or cannot be."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted, text = spec.checkpoint.memory_budget, environ.get(MEMORY_BUDGET)
    if wanted is not None or not text:
        return choose_budget(wanted, None, machine)
    try:
        return choose_budget(None, parse_size(text), machine)
    except Refused as error:
        raise Refused(f"{MEMORY_BUDGET}: {error.message}", error.fix) from error


def hiding_places(key_files: Iterable[Path]) -> tuple[Path, ...]:
    """What to hide so that nobody reads ``key_files``: the files, and a folder that holds nothing but files of its owner alone."""
    found: list[Path] = []
    for file in key_files:
        if _keeps_secrets_only(file.parent):
            found.append(file.parent)
        found.append(file)
    return tuple(dict.fromkeys(found))


def _keeps_secrets_only(folder: Path) -> bool:
    """False for folders such as /root or /etc, which the worker needs; copies of a key beside it are then its owner's business."""
    try:
        status = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
    except OSError:
        return False
    return all(stat.S_ISREG(each.st_mode) and not each.st_mode & 0o077 for each in status)
