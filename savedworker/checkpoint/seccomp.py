"""The system-call filter: what CRIU cannot save answers ENOSYS, so that libraries fall back to what it can.

Shown for io_uring with uvloop and node. Nested user namespaces cannot be saved either: creating one answers EPERM.

What CRIU would *lose without a word* is refused in the same way (seen with 4.2.1): after a restore a process would be outside
its Landlock sandbox, memory would have lost its protection keys, and keys their keyring. Multipath TCP, which Go asks for when
it listens, answers that there is no such protocol, and plain TCP is used.
"""

from __future__ import annotations

from typing import Any

UNSAVEABLE = (
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "userfaultfd",
    "mq_open",
    "fanotify_init",
    "perf_event_open",
    "bpf",
    "memfd_secret",
    "landlock_create_ruleset",
    "landlock_add_rule",
    "landlock_restrict_self",
    "pkey_alloc",
    "add_key",
    "request_key",
    "keyctl",
)
_ENOSYS = 38
_EPERM = 1
_EPROTONOSUPPORT = 93
_IPPROTO_MPTCP = 262
_CLONE_NEWUSER = 0x10000000


def profile() -> dict[str, Any]:
    """The ``linux.seccomp`` section of an OCI runtime configuration.

    clone3 passes its flags in memory, where a filter cannot look; ENOSYS makes the C library use clone instead.
    """
    new_user = {"index": 0, "value": _CLONE_NEWUSER, "valueTwo": _CLONE_NEWUSER, "op": "SCMP_CMP_MASKED_EQ"}
    multipath = {"index": 2, "value": _IPPROTO_MPTCP, "op": "SCMP_CMP_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": [*UNSAVEABLE, "clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
            {
                "names": ["unshare", "clone"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": _EPERM,
                "args": [new_user],
            },
            {
                "names": ["socket"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": _EPROTONOSUPPORT,
                "args": [multipath],
            },
        ],
    }
