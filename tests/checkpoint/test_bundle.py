"""The OCI configuration of a worker: users, namespaces, what it may do, and what its system calls answer."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from savedworker.checkpoint import bundle, seccomp
from savedworker.model.manifest import Runtime
from savedworker.model.spec import Volume, WorkerSpec
from tests.checkpoint.bench import Bench

PATHS = bundle.BundlePaths(
    Path("/h/rootfs"),
    Path("/h/shm"),
    Path("/h/resolv.conf"),
    Path("/h/criu.conf"),
    Path("/run/netns/n"),
    "/c/worker",
)


def made(spec: WorkerSpec, syscalls: str = "guarded") -> dict:
    ids = (1000, 1000, [27], "/home/me")
    return bundle.configuration(spec, Runtime(hostname="w", syscalls=syscalls), ids, PATHS)


def test_the_same_worker_gets_the_same_configuration_everywhere() -> None:
    spec = WorkerSpec(
        id="w",
        command=("run", "it"),
        env={"A": "b"},
        workdir="/srv",
        volumes=(Volume(source="/x", target="/data"),),
    )
    assert made(spec) == made(spec)
    process = made(spec)["process"]
    assert process["args"] == ["/.savedworker/init", "/.savedworker/status", "run", "it"]
    assert process["cwd"] == "/srv"
    assert process["user"] == {"uid": 1000, "gid": 1000, "additionalGids": [27]}
    assert {"HOME=/home/me", "A=b"} <= set(process["env"])
    assert process["rlimits"] == []


def test_another_user_than_root_has_no_capabilities() -> None:
    capabilities = made(WorkerSpec(id="w", command=("x",)))["process"]["capabilities"]
    assert capabilities["effective"] == capabilities["permitted"] == []


def test_dev_shm_is_a_bind_mount_and_the_cgroup_file_system_is_left_out() -> None:
    mounts = {m["destination"]: m for m in made(WorkerSpec(id="w", command=("x",)))["mounts"]}
    assert mounts["/dev/shm"]["type"] == "bind"
    assert "/sys/fs/cgroup" not in mounts


def test_with_host_networking_there_is_no_network_namespace() -> None:
    paths = bundle.BundlePaths(**{**PATHS.__dict__, "netns": None, "resolv_conf": None})
    spec = WorkerSpec(id="w", command=("x",), network="host")
    document = bundle.configuration(spec, Runtime(hostname="w", network="host"), (0, 0, [], "/"), paths)
    assert "network" not in {n["type"] for n in document["linux"]["namespaces"]}
    assert {"pid", "mount", "ipc", "uts", "time"} == {n["type"] for n in document["linux"]["namespaces"]}


def test_only_devices_that_are_volumes_may_be_used() -> None:
    spec = WorkerSpec(id="w", command=("x",), volumes=(Volume(source="/dev/full", target="/dev/mine"),))
    devices = made(spec)["linux"]["resources"]["devices"]
    assert devices == [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 1, "minor": 7, "access": "rw"},
    ]


def test_the_configuration_file_may_be_read_by_root_alone_because_it_holds_the_environment(
    tmp_path: Path,
) -> None:
    bundle.write(tmp_path / "bundle", {"a": 1})
    file = tmp_path / "bundle" / "config.json"
    assert json.loads(file.read_text()) == {"a": 1}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_all_system_calls_means_no_filter() -> None:
    assert "seccomp" in made(WorkerSpec(id="w", command=("x",)))["linux"]
    assert "seccomp" not in made(WorkerSpec(id="w", command=("x",)), syscalls="all")["linux"]


NUMBERS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "userfaultfd": 323,
    "mq_open": 240,
    "fanotify_init": 300,
    "perf_event_open": 298,
    "bpf": 321,
    "memfd_secret": 447,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "pkey_alloc": 330,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "clone3": 435,
}
"""x86-64."""

CALLS = """
import ctypes, errno, json, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def answer(*call):
    ctypes.set_errno(0)
    result = libc.syscall(*call)
    return "went through" if result >= 0 else errno.errorcode[ctypes.get_errno()]
found = {name: answer(number, 0, 0, 0, 0, 0) for name, number in json.loads(sys.argv[1]).items()}
found["unshare"] = answer(272, 0x10000000)
found["unshare with more"] = answer(272, 0x10000000 | 0x20000)
found["clone"] = answer(56, 0x10000000 | 17, 0, 0, 0, 0)
found["multipath TCP"] = answer(41, 2, 1, 262, 0, 0)
found["unshare mount"] = answer(272, 0x20000)
found["subprocess"] = subprocess.run(["/bin/echo", "works"], capture_output=True, text=True).stdout.strip()
print(json.dumps(found), flush=True)
import time; time.sleep(1000)
"""


@pytest.mark.criu
def test_what_cannot_be_saved_answers_that_it_does_not_exist_and_a_user_namespace_that_it_may_not(
    bench: Bench,
) -> None:
    assert set(seccomp.UNSAVEABLE) < set(NUMBERS)
    bench.python(CALLS, json.dumps(NUMBERS))
    bench.until_output("}")
    found = json.loads(bench.text)
    assert {name: found[name] for name in NUMBERS} == dict.fromkeys(NUMBERS, "ENOSYS")
    assert (found["unshare"], found["unshare with more"], found["clone"]) == ("EPERM", "EPERM", "EPERM")
    assert found["multipath TCP"] == "EPROTONOSUPPORT"
    assert found["subprocess"] == "works"
