"""One real worker each: hostile names never reach a shell, secrets never reach what people look at."""

from __future__ import annotations

import os
import secrets
import stat
import threading
from pathlib import Path

import pytest

from savedworker.model.record import State
from savedworker.model.spec import Volume
from tests.hostile.conftest import ODD
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World

pytestmark = pytest.mark.criu

TICKS = (
    PRELUDE
    + """
for step in range(80):
    say("step", step)
    time.sleep(0.05)
wait_for("end")
print(os.getcwd() == sys.argv[1], os.environ["ODD"] == sys.argv[2], sorted(os.listdir(sys.argv[3])))
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


class Watcher:
    """Collects the argument vectors of all processes of the machine, several times a second."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    self.seen.add(Path(f"/proc/{pid}/cmdline").read_bytes())
                except OSError:
                    continue

    def stop(self) -> set[bytes]:
        self._stop.set()
        self._thread.join()
        return self.seen


def files_below(folder: Path) -> list[Path]:
    return [Path(top, name) for top, _, names in os.walk(folder) for name in names]


def holding(words: list[bytes], files: list[Path]) -> list[Path]:
    """The regular files among ``files`` in which one of ``words`` stands."""
    found = []
    for file in files:
        try:
            if stat.S_ISREG(file.lstat().st_mode):
                data = file.read_bytes()
                found += [file] if any(word in data for word in words) else []
        except OSError:
            continue
    return found


def test_names_that_a_shell_would_act_on_are_names_and_a_worker_with_them_moves(
    odd_world: World, gate: Gate, tmp_path: Path
) -> None:
    source = tmp_path / f"source {ODD}"
    source.mkdir()
    (source / ODD).write_text("x")
    target = f"/data {ODD}"
    value = f"{ODD}\n$(id)\n'; exit 9 #"
    worker = odd_world.python(
        TICKS,
        target,
        value,
        target,
        id=f"odd-{os.getpid()}",
        env={"ODD": value, "A B": ODD},
        workdir=target,
        volumes=(Volume(source=str(source), target=target), gate.volume),
    )
    odd_world.until_output(worker, "step 5\n")
    odd_world.preempt(worker, notice=30)
    gate.open("end")
    record = odd_world.until_settled(worker)
    assert record.state is State.SUCCEEDED, odd_world.story(worker)
    assert (record.migrations, record.cold_starts) == (1, 0), odd_world.story(worker)
    assert odd_world.output(worker).endswith(f"True True {[ODD]!r}\n")
    assert [x.name for x in source.iterdir()] == [ODD]


def test_a_secret_in_the_environment_is_in_no_argument_log_event_record_or_report(
    odd_world: World, gate: Gate
) -> None:
    secret = f"secret-{secrets.token_hex(12)}"
    words = [secret.encode(), b"the-key-of-the-submitter"]
    watcher = Watcher()
    worker = odd_world.python(
        TICKS,
        "/",
        "odd",
        "/srv",
        id=f"secret-{os.getpid()}",
        env={"PASSWORD": secret, "ODD": "odd"},
        volumes=(gate.volume,),
    )
    odd_world.until_output(worker, "step 5\n")
    state = Path(os.environ["SAVEDWORKER_LOCAL_DIR"])
    agent = odd_world.host(worker).scratch / "agent"
    on_the_instance = holding(words, [x for x in files_below(state) if "rootfs" not in x.parts])
    assert {x.name for x in on_the_instance} <= {"config.json", "state.json"}, on_the_instance
    assert all(not x.stat().st_mode & 0o077 for x in on_the_instance), on_the_instance
    for folder in (state, state / "hosts", agent, agent / "worker", agent / "shim"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for name in (
        "shim/stdout.spool",
        "shim/stderr.spool",
        "shim/shim.sock",
        "shim/shim.log",
        "attachment.json",
    ):
        assert not (agent / name).stat().st_mode & 0o077, name
    odd_world.checkpoint(worker)
    odd_world.preempt(worker, notice=30)
    gate.open("end")
    record = odd_world.until_settled(worker)
    assert record.migrations == 1, odd_world.story(worker)
    argument_vectors = watcher.stop()
    assert [x for x in argument_vectors if any(word in x for word in words)] == []
    assert any(b"runc" in x for x in argument_vectors)  # so it did look
    store = Path(odd_world.folder) / "store"
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    told = [x for x in files_below(store) if "chunks" not in x.parts]
    assert {x.name for x in holding(words, told)} == {"spec.json"}
    assert holding([b"the-key-of-the-submitter"], told) == []
    assert len(told) > 10
    assert holding(words, files_below(state)) == []  # tombstones and the logs of the hosts that ended
    shown = odd_world.report(worker).model_dump_json() + odd_world.story(worker)
    assert secret not in shown


def test_a_worker_that_wrecks_its_own_runtime_folder_moves_and_its_failure_stays_a_failure(
    odd_world: World, gate: Gate
) -> None:
    program = (
        PRELUDE
        + """
import shutil
shutil.rmtree("/.savedworker")
os.symlink("/etc", "/.savedworker")
for step in range(40):
    say("step", step)
    time.sleep(0.05)
wait_for("end")
os.unlink("/.savedworker")
os.mkdir("/.savedworker")
open("/.savedworker/status", "w").write("exit 0\\n")
sys.exit(7)
"""
    )
    worker = odd_world.python(program, id=f"wreck-{os.getpid()}", volumes=(gate.volume,))
    odd_world.until_output(worker, "step 5\n")
    odd_world.preempt(worker, notice=30)
    gate.open("end")
    record = odd_world.until_settled(worker)
    assert (record.state, record.exit_code) == (State.FAILED, 7), odd_world.story(worker)
    assert (record.migrations, record.cold_starts) == (1, 0), odd_world.story(worker)
