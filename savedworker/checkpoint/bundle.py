"""The OCI runtime configuration of one incarnation. The same worker gets the same one on every instance."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from savedworker.checkpoint import seccomp
from savedworker.checkpoint.network import CREDENTIALS_PATH
from savedworker.model.manifest import Runtime
from savedworker.model.spec import WorkerSpec

CAPABILITIES = [
    f"CAP_{name}"
    for name in [
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "SETPCAP",
        "NET_BIND_SERVICE",
        "NET_RAW",
        "SYS_CHROOT",
        "MKNOD",
        "AUDIT_WRITE",
        "SETFCAP",
    ]
]
"""What the worker's root may do: the usual container set."""

_MASKED = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/sched_debug", "/proc/timer_list")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUNTIME_FOLDER = ".savedworker"
"""Inside the writable layer: init, so that it travels with the worker, and its status file."""


@dataclass(frozen=True)
class BundlePaths:
    """Absolute paths on this instance that the configuration names."""

    rootfs: Path
    shm: Path
    resolv_conf: Path | None
    criu_conf: Path
    netns: Path | None
    cgroup: str


def configuration(
    spec: WorkerSpec, runtime: Runtime, ids: tuple[int, int, list[int], str], paths: BundlePaths
) -> dict[str, Any]:
    """The ``config.json`` document. ``ids`` are uid, gid, supplementary gids and home directory."""
    uid, gid, more, home = ids
    environment = {"PATH": DEFAULT_PATH, "HOME": home, "LANG": "C.UTF-8", **_credentials(spec), **spec.env}
    caps = CAPABILITIES if uid == 0 else []
    namespaces: list[dict[str, str]] = [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "time")]
    if paths.netns is not None:
        namespaces.append({"type": "network", "path": str(paths.netns)})
    linux: dict[str, Any] = {
        "namespaces": namespaces,
        "timeOffsets": {"monotonic": {"secs": 0, "nanosecs": 0}, "boottime": {"secs": 0, "nanosecs": 0}},
        "cgroupsPath": paths.cgroup,
        "resources": _resources(spec),
        "maskedPaths": [*_MASKED, *runtime.masked],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
    }
    if runtime.syscalls == "guarded":
        linux["seccomp"] = seccomp.profile()
    return {
        "ociVersion": "1.2.0",
        "hostname": runtime.hostname,
        "process": {
            "terminal": False,
            "user": {"uid": uid, "gid": gid, "additionalGids": more},
            "args": [f"/{RUNTIME_FOLDER}/init", f"/{RUNTIME_FOLDER}/status", *spec.command],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": spec.workdir,
            "capabilities": {"bounding": CAPABILITIES, "effective": caps, "permitted": caps},
            "rlimits": [],  # CRIU restores limits itself; runc without CAP_SYS_RESOURCE may not set them
            "noNewPrivileges": False,
        },
        "root": {"path": str(paths.rootfs), "readonly": False},
        "mounts": _mounts(spec, paths),
        "linux": linux,
        "annotations": {"org.criu.config": str(paths.criu_conf)},
    }


def _credentials(spec: WorkerSpec) -> dict[str, str]:
    if spec.credentials == "none":
        return {}
    return {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": CREDENTIALS_PATH}


def write(folder: Path, document: dict[str, Any]) -> None:
    """Write ``config.json`` into the bundle ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(document, indent=1))
    file.chmod(0o600)  # the environment may hold secrets


def _resources(spec: WorkerSpec) -> dict[str, Any]:
    devices: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    for volume in spec.volumes:
        node = _device(volume.source)
        if node is not None:
            kind, major, minor = node
            devices.append({"allow": True, "type": kind, "major": major, "minor": minor, "access": "rw"})
    resources: dict[str, Any] = {"devices": devices}
    if spec.memory:
        resources["memory"] = {"limit": spec.memory}
    if spec.cpus:
        resources["cpu"] = {"period": 100_000, "quota": int(spec.cpus * 100_000)}
    return resources


def _device(path: str) -> tuple[str, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        kind = "c" if stat.S_ISCHR(found.st_mode) else "b"
        return kind, os.major(found.st_rdev), os.minor(found.st_rdev)
    return None


def _mounts(spec: WorkerSpec, paths: BundlePaths) -> list[dict[str, Any]]:
    def mount(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": kind, "source": source, "options": list(options)}

    mounts = [
        mount("/proc", "proc", "proc"),
        mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            "nosuid",
            "noexec",
            "newinstance",
            "ptmxmode=0666",
            "mode=0620",
            "gid=5",
        ),
        # A tmpfs of the container's own would go through CRIU's single-threaded tar and gzip; this one we capture.
        mount("/dev/shm", "bind", str(paths.shm), "rbind", "rw", "nosuid", "nodev", "noexec"),
        mount("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev"),
        mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "nodev", "ro"),
    ]
    if paths.resolv_conf is not None:
        mounts.append(mount("/etc/resolv.conf", "bind", str(paths.resolv_conf), "bind", "ro"))
    for volume in spec.volumes:
        mode = "ro" if volume.read_only else "rw"
        mounts.append(mount(volume.target, "bind", volume.source, "rbind", mode))
    return mounts
