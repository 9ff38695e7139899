"""How a host goes, from inside (its daemon) or from outside (any process, once the daemon is dead). All steps are idempotent."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from savedworker.checkpoint.mountinfo import mounts_below
from savedworker.fleet.local import network
from savedworker.fleet.local.cgroup import HostCgroup
from savedworker.fleet.local.host import Ended, HostDir, HostRecord
from savedworker.fleet.local.namespaces import detach
from savedworker.model.errors import Temporary


def destroy(
    host: HostDir, record: HostRecord, ended: Ended, step_outside: Callable[[], None] = lambda: None
) -> None:
    """End every process of the host, write its tombstone, then remove what it had. The caller holds the host's lock.

    ``step_outside`` is called when no other process of the host is left: the daemon returns to the namespaces in which it
    was started. Raises Temporary; calling again goes on where it failed.
    """
    earlier = host.ended()
    if earlier and earlier.cleaned:
        return
    ended = earlier or ended
    if record.this_boot:
        HostCgroup(record.cgroup).kill_all()
    host.write_ended(ended)
    step_outside()
    remove_names(record, host.path)
    remove_tree(host.scratch)
    host.remove_control()
    host.write_ended(replace(ended, cleaned=True))


def undo(host: HostDir, record: HostRecord | None) -> None:
    """Remove a host that never came to be, and its directory: the launch can be tried again. The caller holds the lock."""
    if record is not None:
        dismantle(record, host.path)
    remove_tree(host.path)


def dismantle(record: HostRecord, owner: Path) -> None:
    """End and remove all that does not live in the host's directory. Raises Temporary."""
    if record.this_boot:
        HostCgroup(record.cgroup).kill_all()
    remove_names(record, owner)


def remove_names(record: HostRecord, owner: Path) -> None:
    """Remove namespace, veth pair and cgroups, then free the address under which nobody else could use these names."""
    if not record.this_boot:
        return  # another host may have these names by now
    network.remove(record.netns, record.link)
    HostCgroup(record.cgroup).remove()
    network.release_address(record.address, owner)


def remove_abandoned(address: str) -> None:
    """The same for a claimed address whose host directory was removed by hand."""
    short = network.short_name(address)
    cgroup = HostCgroup(f"/savedworker/host-{short}")
    cgroup.kill_all()
    network.remove(f"sw-{short}", f"swv{short}")
    cgroup.remove()
    network.release_address(address)


def unmount_below(directory: Path) -> None:
    """Take every mount below ``directory`` out of this mount namespace."""
    for point in mounts_below(directory):
        with contextlib.suppress(OSError):  # gone with the one it was mounted on; remove_tree looks again
            detach(point)


def remove_tree(directory: Path) -> None:
    """Remove ``directory``, but never through a mount: a volume of the user's could be behind it. Raises Temporary."""
    if not directory.exists():
        return
    unmount_below(directory)
    left = mounts_below(directory)
    if left:
        raise Temporary(f"{left[0]} is still mounted")
    done = subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Temporary(f"{directory} cannot be removed: {done.stderr.strip()[:500]}")
