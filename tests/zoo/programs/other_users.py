"""Root that hands work to other users: setuid children, one with kept capabilities, groups, umask, limits and priority."""

import ctypes
import os
import resource
import time

from common import called, libc, run

(
    PR_SET_KEEPCAPS,
    PR_SET_PDEATHSIG,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_NAME,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
) = 8, 1, 38, 15, 36, 4


def status(pid: int) -> dict[str, str]:
    wanted = (
        "Name",
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
    )
    lines = (line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    found = {name: " ".join(value.split()) for name, value in lines if name in wanted}
    found["nice"] = str(os.getpriority(os.PRIO_PROCESS, pid))
    found["policy"] = str(os.sched_getscheduler(pid))
    found["limits"] = " ".join(open(f"/proc/{pid}/limits").read().split())
    found["oom"] = open(f"/proc/{pid}/oom_score_adj").read()
    found["cpus"] = str(os.sched_getaffinity(pid))
    return found


def child(what) -> int:
    pid = os.fork()
    if pid == 0:
        what()
        while True:
            time.sleep(1)
    return pid


def nobody() -> None:
    os.setgroups([5, 6])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    os.umask(0o077)


def keeps() -> None:
    called(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
    os.setresgid(1000, 1000, 1000)
    os.setresuid(1000, 1000, 1000)
    header, data = ctypes.create_string_buffer(8), ctypes.create_string_buffer(24)
    header.raw = (0x20080522).to_bytes(4, "little") + bytes(4)
    called(libc.capget(header, data), "capget")
    data.raw = (1 << 10).to_bytes(4, "little") + data.raw[4:]  # CAP_NET_BIND_SERVICE becomes effective
    called(libc.capset(header, data), "capset")


def saved_ids() -> None:
    os.setresuid(1001, 1002, 0)


def lowered() -> None:
    os.nice(7)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, 8 << 20))
    os.sched_setaffinity(0, {0})
    called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    called(libc.prctl(PR_SET_NAME, b"another name", 0, 0, 0), "prctl")
    open("/proc/self/oom_score_adj", "w").write("500")


def not_dumpable() -> None:
    nobody()
    called(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


pids = [child(x) for x in (nobody, keeps, saved_ids, lowered, not_dumpable)]
time.sleep(0.5)
before = {pid: status(pid) for pid in pids}
assert before[pids[0]]["Uid"].startswith("65534")
assert before[pids[1]]["CapEff"].endswith("400")


def check(n: int) -> None:
    for pid in pids:
        now = status(pid)
        differs = {k: (v, now.get(k)) for k, v in before[pid].items() if now.get(k) != v}
        assert not differs, f"{pids.index(pid)}: {differs}"


run(check)
for pid in pids:
    os.kill(pid, 9)
