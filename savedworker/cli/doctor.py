"""``savedworker doctor``: whether this machine can be an instance, and whether the store can hold workers."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from savedworker.checkpoint.mountinfo import mounts
from savedworker.cli.exit_status import OTHER, BadArgument
from savedworker.cli.fit import fleet_finding, worker_findings
from savedworker.cli.options import get_fleet, json_option, open_client, store_option, worker_id
from savedworker.fleet.base import Diagnoses, Fleet
from savedworker.fleet.finding import Finding, Level
from savedworker.model.errors import AlreadyExists, Conflict, Refused, SavedWorkerError
from savedworker.model.units import format_size
from savedworker.store.backend import Store
from savedworker.store.sealing import ALLOW_PLAIN, NO_KEY, sealing_from_environment

NEEDED = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_TIME": 25,
}
"""Capabilities of the agent, by bit (capabilities(7)); SYS_TIME is for the time namespace."""
SYS_RESOURCE = 24
LEAST_KERNEL = (5, 10)
LITTLE_SPACE = 10 << 30
TOO_LITTLE_SPACE = 1 << 30
_TIMEOUT = 20.0


@click.command()
@click.argument("worker", required=False, type=worker_id)
@click.option("--worker", "named", metavar="ID", type=worker_id, help="As the argument.")
@click.option(
    "--fleet",
    metavar="NAME",
    help="Default: local, or the worker's. For another fleet it and the store are checked, and not this machine.",
)
@store_option
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    worker: str | None,
    named: str | None,
    fleet: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Check that workers can be saved here, and in time.

    With WORKER: whether it would fit its notice now. Without: looks at rights, kernel, tools, file systems, network, store and keys (of a fleet of AWS:
    at credentials, permissions, queues, image, roles, network and bucket), and how much a notice is enough for.

    Exits with 1 when something FAILs.
    """
    if worker and named and worker != named:
        raise BadArgument(f"two workers are named, {worker} and {named}", "give one")
    worker = worker or named
    try:
        checked = get_fleet(fleet or "local")
    except Refused as error:
        raise BadArgument(error.message, error.fix) from error
    if worker is not None:
        findings = worker_findings(open_client(store).store, worker, fleet, datetime.now(UTC))
    else:
        findings = diagnose(open_client(store, NO_KEY).store, checked)
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "check": f.check,
                        "level": f.level,
                        "ok": f.level != "FAIL",
                        "detail": f.detail,
                        "fix": f.fix,
                    }
                    for f in found
                ],
                indent=2,
                ensure_ascii=False,
            )
        )
    ctx.exit(OTHER if any(f.level == "FAIL" for f in found) else 0)


def _print(finding: Finding) -> None:
    colour = {"OK": "green", "WARN": "yellow", "FAIL": "red"}[finding.level]
    fix = f". Fix: {finding.fix}" if finding.fix and finding.level != "OK" else ""
    click.echo(f"{click.style(f'{finding.level:<4}', fg=colour)}  {finding.check:<14}  {finding.detail}{fix}")


def diagnose(store: Store, fleet: Fleet) -> Iterator[Finding]:
    """All findings; those about this machine only when it is to be an instance."""
    if fleet.embedded:
        for probe in PROBES:
            yield from _guarded(probe)
        yield from checkpoint_findings()
    asked: object = fleet
    if isinstance(asked, Diagnoses):
        yield from asked.diagnose(store.url)
    of_store = store_findings(store)
    yield from of_store
    yield encryption_finding()
    if all(finding.level != "FAIL" for finding in of_store):
        yield fleet_finding(store, fleet.name)


def _guarded(probe: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return probe()
    except (OSError, subprocess.SubprocessError, SavedWorkerError, ValueError) as error:
        name = probe.__name__.strip("_").removeprefix("check_").replace("_", " ")
        return [Finding(name, "FAIL", f"could not be checked: {error}", getattr(error, "fix", ""))]


def check_rights() -> list[Finding]:
    """Root, and the capabilities that the agent needs."""
    if os.geteuid() != 0:
        return [
            Finding(
                "rights",
                "FAIL",
                f"not root but uid {os.geteuid()}",
                "run as root, in a container with --privileged",
            )
        ]
    bits = _effective_capabilities()
    missing = [name for name, bit in NEEDED.items() if not bits >> bit & 1]
    if missing:
        return [
            Finding(
                "rights",
                "FAIL",
                f"capabilities missing: {', '.join(missing)}",
                "run the container with --privileged",
            )
        ]
    if not bits >> SYS_RESOURCE & 1:
        return [
            Finding(
                "rights",
                "OK",
                "root; without CAP_SYS_RESOURCE, so criu gets a small library to read the limits of other users",
            )
        ]
    return [Finding("rights", "OK", "root with all capabilities that are needed")]


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def check_kernel() -> list[Finding]:
    """Version and time namespaces (a worker's monotonic clock must go on where it stopped)."""
    release = platform.release()
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if version < LEAST_KERNEL:
        return [Finding("kernel", "FAIL", f"{release} is older than 5.10", "boot a newer kernel")]
    if not Path("/proc/self/ns/time").exists():
        return [
            Finding(
                "kernel", "FAIL", f"{release} has no time namespaces", "boot one built with CONFIG_TIME_NS"
            )
        ]
    return [Finding("kernel", "OK", f"{release} on {platform.machine()}, with time namespaces")]


def check_tools() -> list[Finding]:
    """CRIU and runc, and what CRIU says about this kernel."""
    from savedworker.checkpoint.tools import find_tools

    tools = find_tools()
    found = [
        Finding("criu", "OK", f"{tools.criu_version}, {tools.criu}"),
        Finding("runc", "OK", f"{tools.runc_version}, {tools.runc}"),
    ]
    check = _run([str(tools.criu), "check"])
    if check.returncode:
        words = [
            line for line in (check.stderr + check.stdout).splitlines() if "Error" in line or "Warn" in line
        ]
        text = " ".join((words or [f"exit status {check.returncode}"])[0].split())
        found.append(
            Finding(
                "criu check", "FAIL", text, "boot a kernel with CONFIG_CHECKPOINT_RESTORE, or update CRIU"
            )
        )
    else:
        found.append(Finding("criu check", "OK", "CRIU can use this kernel"))
    return found


def check_dirty_pages() -> list[Finding]:
    """What the kernel knows of pages that were written to."""
    from savedworker.checkpoint.dirty_tracking import look

    there = look()
    words = {True: "yes", False: "no"}
    return [
        Finding(
            "dirty pages",
            "OK",
            f"soft-dirty: {words[there.soft_dirty]}; from outside (userfaultfd write-protection, PAGEMAP_SCAN): "
            f"{words[there.from_outside]}. Not used so far: a checkpoint looks at all memory, and uploads what changed",
        )
    ]


def check_overlay() -> list[Finding]:
    """An overlay over this machine's own root, in the scratch directory, as every worker gets one."""
    scratch = scratch_folder()
    root = _file_system("/")
    if root == "overlay":
        return [
            Finding(
                "overlay",
                "WARN",
                "/ is itself an overlay, which cannot be below another one",
                "use --image DIR with the directory on a volume",
            )
        ]
    with tempfile.TemporaryDirectory(prefix="savedworker-doctor-", dir=scratch) as folder:
        for name in ("upper", "work", "merged"):
            Path(folder, name).mkdir()
        # In a mount namespace of its own, so that nothing stays mounted whatever happens.
        mount = _run(
            [
                "unshare",
                "-m",
                "mount",
                "-t",
                "overlay",
                "overlay",
                "-o",
                f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work",
                f"{folder}/merged",
            ]
        )
    if mount.returncode:
        return [
            Finding(
                "overlay",
                "FAIL",
                f"{scratch}: {' '.join(mount.stderr.split())}",
                "use a scratch directory on ext4 or xfs",
            )
        ]
    return [Finding("overlay", "OK", f"{scratch} ({_file_system(scratch)}) over / ({root})")]


def check_cgroups() -> list[Finding]:
    """Version, and the controllers by which workers are frozen and limited."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return _cgroups_v2(root)
    if not (root / "freezer").is_dir():
        return [
            Finding(
                "cgroups",
                "FAIL",
                "no freezer: neither version 1 nor 2 is mounted",
                "mount cgroups at /sys/fs/cgroup",
            )
        ]
    missing = [name for name in ("memory", "cpu", "pids") if not (root / name).is_dir()]
    if not os.access(root / "freezer", os.W_OK):
        return [Finding("cgroups", "FAIL", "version 1, read-only", "run the container with --privileged")]
    if missing:
        return [
            Finding(
                "cgroups",
                "WARN",
                f"version 1 without {', '.join(missing)}: limits do not hold",
                "mount those controllers",
            )
        ]
    return [Finding("cgroups", "OK", "version 1")]


def _cgroups_v2(root: Path) -> list[Finding]:
    there = (root / "cgroup.controllers").read_text().split()
    missing = [name for name in ("memory", "cpu", "pids") if name not in there]
    if missing:
        return [
            Finding(
                "cgroups",
                "WARN",
                f"version 2 without {', '.join(missing)}: limits do not hold",
                "delegate those controllers",
            )
        ]
    return [Finding("cgroups", "OK", "version 2")]


def check_what_criu_calls() -> list[Finding]:
    """What CRIU needs besides itself: a device, and programs for the tmpfs that a container has at /dev."""
    from savedworker.checkpoint.tools import which

    missing = [name for name in ("tar", "gzip") if which(name) is None]
    missing += [] if os.path.exists("/bin/sh") else ["/bin/sh"]
    if missing:
        detail = f"{', '.join(missing)} is missing" if len(missing) == 1 else f"missing: {', '.join(missing)}"
        return [Finding("criu's tools", "FAIL", detail, "apt-get install tar gzip dash")]
    if not os.path.exists("/dev/net/tun"):
        fix = "modprobe tun; a container is given the device, or is privileged"
        return [
            Finding("criu's tools", "FAIL", "there is no /dev/net/tun, without which CRIU saves nothing", fix)
        ]
    return [Finding("criu's tools", "OK", "tar, gzip, a shell and /dev/net/tun")]


def check_network() -> list[Finding]:
    """What a private network needs: ip, ss, nft and network namespaces."""
    from savedworker.checkpoint.tools import which

    packages = {"ip": "iproute2", "ss": "iproute2", "nft": "nftables"}
    missing = [name for name in packages if which(name) is None]
    if missing:
        wanted = " ".join(sorted({packages[name] for name in missing}))
        return [
            Finding(
                "network",
                "WARN",
                f"missing: {', '.join(missing)}; only --network host works",
                f"apt-get install {wanted}",
            )
        ]
    for words, what in (
        (["unshare", "-n", "true"], "network namespaces"),
        ([str(which("nft")), "list", "tables"], "nftables"),
    ):
        done = _run(words)
        if done.returncode:
            text = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            return [
                Finding(
                    "network",
                    "WARN",
                    f"no {what} ({text}); only --network host works",
                    "run with CAP_NET_ADMIN, load nf_tables",
                )
            ]
    return [Finding("network", "OK", "network namespaces, ip, ss and nft")]


def check_space() -> list[Finding]:
    """Room for images and writable layers."""
    scratch = scratch_folder()
    free = shutil.disk_usage(scratch).free
    detail = f"{format_size(free)} free in {scratch}"
    fix = "free some, or set SAVEDWORKER_LOCAL_DIR to another disk"
    if free < TOO_LITTLE_SPACE:
        return [Finding("disk space", "FAIL", detail, fix)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if free < max(LITTLE_SPACE, memory):
        return [
            Finding(
                "disk space",
                "WARN",
                f"{detail}, less than this machine's memory ({format_size(memory)})",
                fix,
            )
        ]
    return [Finding("disk space", "OK", detail)]


def check_memory_budget() -> list[Finding]:
    """What an agent may use here beside its worker."""
    from savedworker.agent.config import MEMORY_BUDGET, memory_budget
    from savedworker.model.budget import shares
    from savedworker.model.spec import WorkerSpec

    try:
        budget = memory_budget(WorkerSpec(id="doctor", command=("doctor",)), os.environ)
    except Refused as error:
        return [Finding("memory budget", "FAIL", error.message, error.fix)]
    by = f"from {MEMORY_BUDGET}" if os.environ.get(MEMORY_BUDGET) else "the default"
    detail = f"an agent uses at most {format_size(budget)} ({by}), with {shares(budget).threads} threads"
    return [Finding("memory budget", "OK", detail)]


PROBES: list[Callable[[], list[Finding]]] = [
    check_rights,
    check_kernel,
    check_tools,
    check_dirty_pages,
    check_overlay,
    check_cgroups,
    check_what_criu_calls,
    check_network,
    check_space,
    check_memory_budget,
]


def checkpoint_findings() -> list[Finding]:
    """What the checkpoint package itself probes, where it does."""
    try:
        probe: Any = import_module("savedworker.checkpoint.probe")
    except ModuleNotFoundError:
        return []
    found: list[Finding] = []
    try:
        for f in probe.probe():
            level: Level = {"OK": "OK", "WARN": "WARN"}.get(str(f.level).upper(), "FAIL")  # type: ignore[assignment]
            found.append(Finding(f.check, level, f.detail, f.fix))
    except (OSError, subprocess.SubprocessError, SavedWorkerError) as error:
        found.append(
            Finding("checkpoint", "FAIL", f"could not be checked: {error}", getattr(error, "fix", ""))
        )
    return found


def store_findings(store: Store) -> list[Finding]:
    """Reachable; create-only and compare-and-swap hold, on which "at most one incarnation" rests."""
    folder = f"doctor/{secrets.token_hex(8)}"
    created, swapped = f"{folder}/created", f"{folder}/swapped"
    try:
        store.ensure()
        try:
            return [_conditional_writes(store, created, swapped)]
        finally:
            with contextlib.suppress(SavedWorkerError):
                store.delete([created, swapped])
    except SavedWorkerError as error:
        return [
            Finding(
                "store",
                "FAIL",
                f"{store.url}: {error.message}",
                error.fix or "check --store and its credentials",
            )
        ]


def _conditional_writes(store: Store, created: str, swapped: str) -> Finding:
    wrong = "use another store: workers would not be safe in this one"
    store.create(created, b"first")
    try:
        store.create(created, b"second")
    except AlreadyExists:
        pass
    else:
        return Finding("store", "FAIL", f"{store.url}: create-only writes replace what is there", wrong)
    first = store.swap(swapped, secrets.token_bytes(16), None)
    store.swap(swapped, secrets.token_bytes(16), first)
    try:
        store.swap(swapped, secrets.token_bytes(16), first)
    except Conflict:
        return Finding("store", "OK", f"{store.url}: reachable, create-only and compare-and-swap hold")
    return Finding("store", "FAIL", f"{store.url}: compare-and-swap does not hold", wrong)


def encryption_finding() -> Finding:
    """Whether workers are sealed, with which key; a key file is readable and its owner's alone."""
    try:
        sealing = sealing_from_environment()
        if sealing.ring is None:
            return Finding(
                "encryption",
                "WARN",
                "no key is configured: everything in the store is plain, all secrets in the memory of workers included",
                "see docs/encryption.md",
            )
        detail = f"new workers are sealed with {sealing.ring.describe()}"
    except Refused as error:
        return Finding("encryption", "FAIL", error.message, error.fix)
    if sealing.allow_plain:
        return Finding(
            "encryption",
            "WARN",
            f"{detail}; workers made without a key are executed too, whoever put them into the store",
            f"unset {ALLOW_PLAIN} when they have ended",
        )
    return Finding("encryption", "OK", detail)


def scratch_folder() -> str:
    """Where workers' layers and images are on this machine: the nearest existing parent of the configured place."""
    place = Path(os.environ.get("SAVEDWORKER_LOCAL_DIR") or "/var/lib/savedworker/local")
    return str(next(p for p in (place, *place.parents) if p.is_dir()))


def _file_system(path: str) -> str:
    best, kind = "", "unknown"
    for mount in mounts():
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and len(mount.point) >= len(best):
            best, kind = mount.point, mount.kind
    return kind


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
