"""What memory is free, as the kernel's files say: of the machine, and of every cgroup above that has a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from savedworker.checkpoint.free_memory import rooms

GIB = 1 << 30
V1_NONE = str(9223372036854771712)


class Proc:
    """A /proc with one cgroup mount, whose files are made by ``group``."""

    def __init__(self, folder: Path, kind: str, options: str, root: str = "/") -> None:
        self.path, self.mount = folder / "proc", folder / "mount point"
        (self.path / "self").mkdir(parents=True)
        self.mount.mkdir()
        self.write("meminfo", f"MemTotal: {24 << 20} kB\nMemAvailable:   {20 << 20} kB\n")
        name = str(self.mount).replace(" ", "\\040")
        self.write(
            "self/mountinfo",
            f"30 20 0:1 / /proc rw - proc proc rw\n35 31 0:32 {root} {name} rw shared:1 - {kind} cgroup rw{options}\n",
        )

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def group(self, path: str, **files: str) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")

    def free(self) -> list[float]:
        return [round(x.free / GIB, 2) for x in rooms(self.path)]


def v1(limit: str, usage: int = 0, cache: int = 0) -> dict[str, str]:
    return {
        "memory__limit_in_bytes": limit,
        "memory__usage_in_bytes": str(usage),
        "memory__stat": f"cache 1\ntotal_inactive_file {cache}\ntotal_active_file 0",
    }


def test_every_limit_on_the_way_up_counts_in_version_1(tmp_path: Path) -> None:
    proc = Proc(tmp_path, "cgroup", ",memory")
    proc.write("self/cgroup", "5:devices:/x\n4:memory:/jobs/one/system\n0::/\n")
    proc.group("", **v1(V1_NONE))
    proc.group("jobs", **v1(str(8 * GIB), 3 * GIB))
    proc.group("jobs/one", **v1(str(4 * GIB), 3 * GIB, cache=2 * GIB))
    proc.group("jobs/one/system", **v1(V1_NONE))
    assert proc.free() == [20, 3, 5]
    assert rooms(proc.path)[1].where == f"are left of the limit of cgroup {proc.mount}/jobs/one"


def test_every_limit_on_the_way_up_counts_in_version_2(tmp_path: Path) -> None:
    proc = Proc(tmp_path, "cgroup2", ",nsdelegate")
    proc.write("self/cgroup", "0::/job/agent\n")
    proc.group("")
    proc.group("job", memory__max=str(6 * GIB), memory__high=str(5 * GIB), memory__current=str(2 * GIB), memory__stat=f"anon 5\ninactive_file {GIB}\nactive_file 0")  # fmt: skip
    proc.group("job/agent", memory__max="max", memory__current="5", memory__stat="anon 5")
    assert proc.free() == [20, 4]


@pytest.mark.parametrize("root", ["/docker/abc", "/"])
def test_in_a_container_that_sees_its_own_cgroup_as_the_top_the_limit_there_counts(
    tmp_path: Path, root: str
) -> None:
    proc = Proc(tmp_path, "cgroup", ",memory", root)
    proc.write("self/cgroup", "4:memory:/docker/abc\n")
    proc.group("", **v1(str(2 * GIB), GIB))
    assert proc.free() == [20, 1]


def test_a_memory_cgroup_that_cannot_be_seen_is_not_taken_for_one_without_a_limit(tmp_path: Path) -> None:
    proc = Proc(tmp_path, "cgroup", ",cpu")
    proc.write("self/cgroup", "4:memory:/docker/abc\n")
    assert proc.free() == []


@pytest.mark.parametrize("lost", ["meminfo", "self/cgroup", "self/mountinfo"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, lost: str) -> None:
    proc = Proc(tmp_path, "cgroup", ",memory")
    proc.write("self/cgroup", "4:memory:/\n")
    proc.group("", **v1(V1_NONE))
    assert proc.free() == [20]
    (proc.path / lost).unlink()
    assert proc.free() == []


def test_this_machine_has_some() -> None:
    found = rooms()
    assert found
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found[0].free <= machine
