"""doctor says what is wrong with this machine or store, and how to mend it."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from savedworker.cli import doctor
from savedworker.cli.options import open_client
from savedworker.controller.client import Client
from savedworker.fleet.finding import Finding
from savedworker.fleet.local import LocalFleet
from savedworker.model.rates import Rates
from savedworker.model.record import CheckpointEntry, State, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import Store, open_store
from savedworker.store.sealing import key_id
from savedworker.store.worker import WorkerStore
from tests.cli.conftest import Shell
from tests.cli.fake_fleet import FakeFleet
from tests.store.keys import key, key_file, sealing, text


def test_a_working_store_is_found_so_and_nothing_is_left_in_it(shell: Shell):
    found = shell.json("doctor", "--fleet", "fake")
    assert [(f["check"], f["level"], f["ok"], f["fix"]) for f in found] == [
        ("store", "OK", True, ""),
        ("encryption", "WARN", True, "see docs/encryption.md"),
        ("notice", "OK", True, ""),
    ]
    assert shell.nothing_created()


def test_a_store_that_cannot_be_written_is_a_failure_with_status_1(shell: Shell):
    result = shell("doctor", "--fleet", "fake", "--store", "/proc/nowhere")
    assert result.exit_code == 1
    assert result.output.startswith("FAIL  store")


@pytest.mark.parametrize(
    ("broken", "text"), [("create", "create-only writes replace"), ("swap", "compare-and-swap does not hold")]
)
def test_a_store_without_conditional_writes_is_a_failure(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, broken: str, text: str
):
    swap = Store.swap
    if broken == "create":
        monkeypatch.setattr(Store, "create", Store.put)
    else:
        monkeypatch.setattr(
            Store,
            "swap",
            lambda self, key, data, expected: swap(self, key + str(len(data)) + data.hex()[:8], data, None),
        )
    (finding,) = doctor.store_findings(open_client(str(shell.store)).store)
    assert finding.level == "FAIL"
    assert text in finding.detail
    assert finding.fix


def test_doctor_says_whether_workers_are_sealed_and_with_which_key(shell: Shell, tmp_path: Path):
    file = key_file(tmp_path / "key", key(), key(2))

    def found(**environ: str) -> tuple[str, str, str]:
        result = shell("doctor", "--fleet", "fake", "--json", **environ)
        (finding,) = [f for f in json.loads(result.stdout) if f["check"] == "encryption"]
        assert result.exit_code == (1 if finding["level"] == "FAIL" else 0)
        assert text(key()) not in result.output
        return finding["level"], finding["detail"], finding["fix"]

    level, detail, _ = found()
    assert (level, "no key is configured: everything in the store is plain" in detail) == ("WARN", True)
    for environ in ({"SAVEDWORKER_KEY_FILE": str(file)}, {"SAVEDWORKER_KEY": text(key())}):
        level, detail, _ = found(**environ)
        assert (level, key_id(key()) in detail) == ("OK", True)
    level, detail, fix = found(SAVEDWORKER_KEY=text(key()), SAVEDWORKER_ALLOW_PLAIN="1")
    assert (level, fix) == ("WARN", "unset SAVEDWORKER_ALLOW_PLAIN when they have ended")
    file.chmod(0o644)
    level, detail, fix = found(SAVEDWORKER_KEY_FILE=str(file))
    assert (level, fix) == ("FAIL", f"chmod 600 {file}")
    assert "mode 0644" in detail


def test_a_bad_key_is_one_line_with_a_fix_for_every_other_command(shell: Shell, tmp_path: Path):
    result = shell("list", SAVEDWORKER_KEY_FILE=str(tmp_path / "none"))
    assert result.exit_code == 2
    assert result.stderr == (
        f"savedworker: the key file {tmp_path}/none cannot be read: No such file or directory. "
        "Fix: check SAVEDWORKER_KEY_FILE\n"
    )
    assert shell.nothing_created()


def test_a_worker_that_is_sealed_is_listed_without_the_key_and_its_log_asks_for_it(shell: Shell):
    client = Client(open_store(str(shell.store), sealing=sealing(key())), lambda _: FakeFleet())
    client.submit(WorkerSpec(id="w", command=("true",), fleet="fake"))
    assert [x["id"] for x in shell.json("list")] == ["w"]
    assert shell.json("report", "w")["state"] == "pending"
    for words in (["logs", "w"], ["run", "--name", "w", "--fleet", "fake", "--", "true"]):
        result = shell(*words)
        assert result.exit_code != 0
        assert f"worker w is sealed with key {key_id(key())}, and no key is configured here" in result.stderr
        assert result.stderr.count("\n") == 1


def test_missing_capabilities_and_missing_root_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(doctor, "_effective_capabilities", lambda: ~(1 << 21) & (1 << 41) - 1)
    assert [(f.level, f.detail) for f in doctor.check_rights()] == [
        ("FAIL", "capabilities missing: CAP_SYS_ADMIN")
    ]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert doctor.check_rights()[0].level == "FAIL"


def test_an_old_kernel_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.release", lambda: "5.4.0-1-aws")
    assert doctor.check_kernel()[0].level == "FAIL"
    monkeypatch.setattr("platform.release", lambda: "6.1.0-rc1+")
    assert doctor.check_kernel()[0].level == "OK"


def test_an_overlay_root_is_a_warning_and_a_refused_overlay_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("SAVEDWORKER_LOCAL_DIR", str(tmp_path / "not" / "there" / "yet"))
    assert doctor.scratch_folder() == str(tmp_path)
    monkeypatch.setattr(doctor, "_file_system", lambda path: "overlay")
    assert doctor.check_overlay()[0].level == "WARN"
    monkeypatch.setattr(doctor, "_file_system", lambda path: "ext4")
    monkeypatch.setattr(
        doctor, "_run", lambda words: subprocess.CompletedProcess(words, 32, "", "mount: wrong fs type\n")
    )
    (finding,) = doctor.check_overlay()
    assert (finding.level, "wrong fs type" in finding.detail) == ("FAIL", True)
    assert list(tmp_path.iterdir()) == []


def test_little_space_is_a_warning_and_none_a_failure(monkeypatch: pytest.MonkeyPatch):
    for free, level in ((1 << 50, "OK"), (2 << 30, "WARN"), (1 << 20, "FAIL")):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        assert doctor.check_space()[0].level == level


def test_a_probe_that_breaks_is_a_failure_of_its_own_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, shell: Shell
):
    def check_something() -> list[Finding]:
        raise OSError("broken")

    monkeypatch.setattr(doctor, "PROBES", [check_something, doctor.check_kernel])
    monkeypatch.setattr(doctor, "checkpoint_findings", list)
    found = list(doctor.diagnose(open_client(str(shell.store)).store, LocalFleet()))
    assert [f.check for f in found] == ["something", "kernel", "store", "encryption", "notice"]
    assert found[0].detail == "could not be checked: broken"


@pytest.mark.criu
def test_this_machine_has_all_that_workers_need(shell: Shell):
    done = shell.run("doctor", "--fleet", "local", "--json", timeout=120)
    found = json.loads(done.stdout)
    assert [f for f in found if not f["ok"]] == []
    assert done.returncode == 0
    assert {
        "rights",
        "kernel",
        "criu",
        "runc",
        "criu check",
        "dirty pages",
        "overlay",
        "cgroups",
        "network",
        "disk space",
        "memory budget",
        "store",
        "notice",
    } <= {f["check"] for f in found}


GIB = 1 << 30
AT = datetime(2026, 1, 2, tzinfo=UTC)


def saved_worker(shell: Shell, name: str, rates: Rates | None, image: int, protected: bool = True) -> None:
    """A worker that runs and has had a checkpoint, as the record tells it."""
    documents = WorkerStore(open_store(str(shell.store)), name)
    documents.store.ensure()
    documents.create_spec(WorkerSpec(id=name, command=("x",), fleet="fake"))
    entry = CheckpointEntry(number="1-1", frozen_at=AT, committed_at=AT, bytes_image=image, bytes_uploaded=1)
    documents.create_record(
        WorkerRecord(
            id=name,
            created_at=AT,
            fleet="fake",
            state=State.RUNNING,
            checkpoints=(entry,),
            rates=rates,
            protected=protected,
            unprotected_reasons=() if protected else ("a checkpoint would take about 2m00s",),
        )
    )


RATES = Rates(dump=2 * GIB, new=GIB / 8, known=GIB, rest=0.5, base=GIB, measured=3)


@pytest.mark.parametrize(
    ("image", "level", "words"),
    [(GIB, "OK", "would take about 2.0s, and a notice on fake gives 25s (1.0 GiB of memory, 1.0 GiB of it known"),
     (8 * GIB, "WARN", "would take about 1m02s, and a notice on fake gives 25s (8.0 GiB of memory, 1.0 GiB of it known")],
)  # fmt: skip
def test_doctor_says_whether_a_worker_would_fit_its_notice_now(
    shell: Shell, image: int, level: str, words: str
):
    saved_worker(shell, "w", RATES, image)
    for named in (["w"], ["--worker", "w"], ["w", "--worker", "w"]):
        found = {f["check"]: f for f in shell.json("doctor", *named)}
        assert list(found) == ["protection", "notice", "encryption"]
        assert (found["protection"]["level"], found["notice"]["level"]) == ("OK", level)
        assert words in found["notice"]["detail"]
        assert bool(found["notice"]["fix"]) == (level == "WARN")
        assert "w is plain in the store" in found["encryption"]["detail"]


def test_doctor_asks_about_the_notice_of_another_fleet_and_repeats_what_the_agent_says(shell: Shell):
    saved_worker(shell, "w", RATES, 5 * GIB, protected=False)
    found = {f["check"]: f for f in shell.json("doctor", "w", "--fleet", "local")}
    assert "a notice on local gives 30s" in found["notice"]["detail"]
    assert found["protection"]["level"] == "WARN"
    assert "w is not protected: a checkpoint would take about 2m00s" in found["protection"]["detail"]


def test_doctor_does_not_guess_what_was_never_measured(shell: Shell):
    saved_worker(shell, "w", None, GIB)
    found = {f["check"]: f for f in shell.json("doctor", "w")}
    assert found["notice"]["level"] == "WARN"
    assert "nothing was measured yet, and a notice on fake gives 25s" in found["notice"]["detail"]
    assert "savedworker checkpoint w" in found["notice"]["fix"]


def test_doctor_refuses_two_names_and_one_that_nobody_has(shell: Shell):
    assert shell("doctor", "a", "--worker", "b").exit_code == 2
    assert shell("doctor", "nobody").exit_code == 1


def test_doctor_says_how_much_a_notice_of_a_fleet_is_enough_for(shell: Shell):
    saved_worker(shell, "slow", RATES, GIB)
    saved_worker(shell, "fast", RATES.model_copy(update={"new": GIB}), GIB)
    saved_worker(shell, "new", None, GIB)
    found = {f["check"]: f for f in shell.json("doctor", "--fleet", "fake")}
    assert "fake gives 25s: enough for 2.9 GiB to 16.3 GiB of memory" in found["notice"]["detail"]
    assert "by 2 workers of this store" in found["notice"]["detail"]


def test_a_kernel_is_asked_what_it_knows_of_dirty_pages():
    from savedworker.checkpoint.dirty_tracking import DirtyTracking, look

    there = look()
    release = tuple(int(x) for x in platform.release().split("-")[0].split(".")[:2])
    if release < (6, 7):
        assert not there.from_outside
    assert there.from_outside == (there.scan and there.write_protect)
    assert not DirtyTracking(True, True, False).from_outside
    (finding,) = doctor.check_dirty_pages()
    assert f"soft-dirty: {'yes' if there.soft_dirty else 'no'}" in finding.detail
