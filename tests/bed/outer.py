"""A container as ECS gives it to a job of AWS Batch: privileged, its root an overlay, files bound into it, one scratch volume.

Runs on a host of the local fleet as that host's agent: ``python -m tests.bed.outer FILE`` reads what to run from FILE and ends with its
exit status. SIGTERM is passed on to the container's first process, as Docker's stop does.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

RUNC = "/opt/savedworker/bin/runc"
_CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
]


@dataclass(frozen=True)
class Job:
    """What is run. ``image``: a root directory. ``binds``: host path -> path inside."""

    image: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    binds: dict[str, str] = field(default_factory=dict)
    scratch: str = "/var/lib/savedworker"
    privileged: bool = True
    machine: bool = False
    """A machine of its own rather than a container: its root is a disk, with ``files``, and nothing is bound into it."""
    files: dict[str, str] = field(default_factory=dict)
    role: dict[str, str] = field(default_factory=dict)
    """The document that ECS's credentials service gives the container, at its path below 169.254.170.2."""

    def write(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self)))
        return file


def capabilities() -> list[str]:
    """All that this machine has to give."""
    match = re.search(r"CapBnd:\s*([0-9a-f]+)", Path("/proc/self/status").read_text())
    assert match is not None
    mask = int(match[1], 16)
    return [f"CAP_{name}" for bit, name in enumerate(_CAPABILITIES) if mask >> bit & 1]


def devices() -> list[dict[str, int | str]]:
    """This machine's device nodes, which a privileged container of Docker's sees all; those that runc makes itself left out."""
    found = []
    for path in ("/dev/net/tun", "/dev/fuse", "/dev/kmsg"):
        with contextlib.suppress(FileNotFoundError):
            node = os.stat(path)
            number = {"major": os.major(node.st_rdev), "minor": os.minor(node.st_rdev)}
            found.append({"path": path, "type": "c", **number, "fileMode": 0o666, "uid": 0, "gid": 0})
    return found


def configuration(job: Job, folder: Path, cgroup: str) -> dict[str, object]:
    """Docker's, for a privileged container (``--privileged``), as far as the agent can tell."""
    mounts: list[dict[str, object]] = []

    def mount(target: str, kind: str, source: str, *options: str) -> None:
        mounts.append({"destination": target, "type": kind, "source": source, "options": list(options)})

    mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev")
    mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k")
    mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")
    mount("/dev/shm", "tmpfs", "shm", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k")
    mount("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev")
    mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "nodev", "rw")
    mount("/sys/fs/cgroup", "cgroup", "cgroup", "nosuid", "noexec", "nodev", "rw")
    if not job.machine:
        mount(job.scratch, "bind", str(folder / "scratch"), "rbind", "rw")
        for name in ("resolv.conf", "hosts", "hostname"):
            mount(f"/etc/{name}", "bind", str(folder / "files" / name), "rbind", "rprivate", "rw")
    for source, target in job.binds.items():
        mount(target, "bind", source, "rbind", "rw")
    given = capabilities() if job.privileged else ["CAP_CHOWN", "CAP_KILL", "CAP_SETUID", "CAP_SETGID"]
    return {
        "ociVersion": "1.2.0",
        "hostname": "container",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(job.command),
            "env": [f"{name}={value}" for name, value in job.environment.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), given),
            "rlimits": [],
            "noNewPrivileges": False,
        },
        "root": {"path": str(folder / "rootfs"), "readonly": False},
        "mounts": mounts,
        "linux": {
            # The host's network, as in ECS's mode "host"; and the host's cgroup namespace, Docker's default on version 1.
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "cgroupsPath": cgroup,
            "devices": devices() if job.privileged else [],
            "resources": {"devices": [{"allow": job.privileged, "access": "rwm"}]},
        },
    }


CREDENTIALS = "/v2/credentials/of-this-task"


def _serve_credentials(role: dict[str, str]) -> None:
    """ECS's service for the roles of tasks, on this host."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            end = datetime.now(UTC) + timedelta(seconds=float(role["seconds"]))
            document = {
                "AccessKeyId": role["access_key"],
                "SecretAccessKey": role["secret_key"],
                "Token": role["token"],
                "Expiration": f"{end:%Y-%m-%dT%H:%M:%SZ}",
                "RoleArn": role["arn"],
            }
            body = json.dumps(document).encode()
            self.send_response(200 if self.path == CREDENTIALS else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    subprocess.run(["ip", "addr", "replace", "169.254.170.2/32", "dev", "lo"], check=True)
    server = http.server.ThreadingHTTPServer(("169.254.170.2", 80), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def run(job: Job, folder: Path) -> int:
    """Run it to its end, below ``folder``. Returns its exit status."""
    for name in ("upper", "work", "rootfs", "scratch", "files", "runc"):
        (folder / name).mkdir(parents=True)
    for name, text in (
        ("resolv.conf", Path("/etc/resolv.conf").read_text()),
        ("hosts", "127.0.0.1 localhost\n"),
        ("hostname", "container\n"),
    ):
        (folder / "files" / name).write_text(text)
    if job.machine:
        subprocess.run(["cp", "-a", f"{job.image}/.", folder / "rootfs"], check=True)
        for name, text in {"/etc/resolv.conf": Path("/etc/resolv.conf").read_text(), **job.files}.items():
            file = folder / "rootfs" / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
    else:
        options = f"lowerdir={job.image},upperdir={folder}/upper,workdir={folder}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder / "rootfs"], check=True)
    if job.role:
        _serve_credentials(job.role)
    # Whatever the container makes lies below the host's cgroup, and goes with the host.
    own = Path("/proc/self/cgroup").read_text()
    match = re.search(r":[^:\n]*\bfreezer\b[^:\n]*:(\S+)|^0::(\S+)", own, re.MULTILINE)
    assert match is not None
    cgroup = (match[1] or match[2]).removesuffix("/system") + "/outer"
    (folder / "config.json").write_text(json.dumps(configuration(job, folder, cgroup)))
    container = f"outer-{os.getpid()}"
    runc = [RUNC, "--root", str(folder / "runc")]
    process = subprocess.Popen([*runc, "run", "--bundle", str(folder), container], stdin=subprocess.DEVNULL)

    def stop(*_: object) -> None:
        subprocess.run([*runc, "kill", container, "TERM"], check=False)

    signal.signal(signal.SIGTERM, stop)
    while True:
        try:
            status = process.wait()
            break
        except InterruptedError:
            continue
    subprocess.run([*runc, "delete", "--force", container], check=False)
    if not job.machine:
        subprocess.run(["umount", "-l", folder / "rootfs"], check=False)
    shutil.rmtree(folder, ignore_errors=True)
    return status


def main() -> int:
    document = json.loads(Path(sys.argv[1]).read_text())
    document["command"] = tuple(document["command"])
    return run(Job(**document), Path.cwd() / f"outer-{os.getpid()}")


if __name__ == "__main__":
    sys.exit(main())
