"""The shortest end-to-end stories: a worker runs, moves, and ends as its process did."""

from __future__ import annotations

import os
from pathlib import Path

from savedworker.model.record import Reason, State
from tests.runtime.gate import Gate
from tests.runtime.world import World

COUNTER = """
import os, sys, time
nonce = os.urandom(8).hex()
file = open("/tmp/steps", "a", buffering=1)
for step in range(int(sys.argv[1])):
    print(nonce, step, flush=True)
    file.write(f"{step}\\n")
    time.sleep(0.05)
while sys.argv[3:] and not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
print("file", len(open("/tmp/steps").read().split()))
print("nonce", nonce)
sys.exit(int(sys.argv[2]))
"""


def test_a_worker_runs_to_its_end_and_its_exit_status_is_reported(world: World) -> None:
    worker = world.python(COUNTER, "10", "0")
    record = world.until_settled(worker)
    assert (record.state, record.reason, record.exit_code) == (State.SUCCEEDED, None, 0)
    assert "file 10\n" in world.output(worker)


def test_with_notice_a_worker_goes_on_elsewhere_and_nothing_is_lost(world: World, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    worker = world.python(COUNTER, "100", "0", "/gate/end", volumes=(gate.volume,))
    world.until_output(worker, " 10\n")
    first = world.host(worker)
    world.preempt(worker, notice=20)
    assert world.host(worker).address != first.address
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert (record.migrations, record.cold_starts) == (1, 0)
    lines = world.output(worker, marks=True).splitlines()
    assert [line.split()[1] for line in lines[:100]] == [str(i) for i in range(100)]
    assert len({line.split()[0] for line in lines[:100]}) == 1
    report = world.report(worker)
    assert report.lost_seconds == 0
    assert [i.end_reason for i in report.incarnations] == ["notice", "finished"]


def test_without_notice_a_worker_goes_on_from_its_last_checkpoint_and_says_what_is_done_again(
    world: World, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    worker = world.python(COUNTER, "120", "3", "/gate/end", volumes=(gate.volume,))
    world.until_output(worker, " 10\n")
    number = world.checkpoint(worker)
    world.until_output(worker, " 40\n")
    world.preempt(worker, notice=None)
    gate.open("end")
    record = world.until_settled(worker)
    assert (record.state, record.reason, record.exit_code) == (State.FAILED, Reason.EXIT, 3), world.story(
        worker
    )
    assert (record.migrations, record.cold_starts) == (1, 0)
    report = world.report(worker)
    assert report.incarnations[1].restored_from == number
    assert report.lost_seconds > 0
    output = world.output(worker, marks=True)
    assert "ended without a last checkpoint" in output
    after = [line for line in output.split("done again below")[1].splitlines() if len(line.split()) == 2]
    steps = [
        int(line.split()[1]) for line in after if line.split()[1].isdigit() and line.split()[0] != "file"
    ]
    assert steps == list(range(steps[0], 120))
    assert "file 120\n" in output


def test_a_worker_on_the_hosts_root_sees_neither_the_store_nor_any_hosts_folders(world: World) -> None:
    secrets = [world.folder / "store", Path(os.environ["SAVEDWORKER_LOCAL_DIR"]) / "hosts"]
    program = "import os, sys; [print(os.listdir(p)) for p in sys.argv[1:]]; import time; time.sleep(600)"
    worker = world.python(program, *map(str, secrets))
    assert world.until_output(worker, "[]\n[]\n") == "[]\n[]\n"
    world.preempt(worker, notice=20)  # the masks are there again
    assert world.record(worker).migrations == 1
