"""A worker's life through the command line, over a real store, with a double for fleet, agent and runtime."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from savedworker.cli.background import log_file
from tests.cli.conftest import Shell

WAITS = "import time; print('begun', flush=True); time.sleep(60)"


def spec_file(tmp_path: Path, command: list[str], **fields) -> str:
    file = tmp_path / f"spec-{len(list(tmp_path.iterdir()))}.json"
    file.write_text(json.dumps({"command": command, **fields}))
    return str(file)


def running(record) -> bool:
    return record.state == "running" and record.protected


def test_run_passes_both_streams_through_byte_for_byte_and_exits_with_the_workers_code(shell: Shell):
    code = (
        "import os, sys\n"
        "data = bytes(range(256)) * 2000 + b'no newline at the end'\n"
        "os.write(1, data[:300000]); os.write(2, b'\\xff\\x00err'); os.write(1, data[300000:])\n"
        "sys.exit(7)"
    )
    done = shell.run("run", "--name", "w", "--json", "--", sys.executable, "-c", code)
    assert done.stdout == bytes(range(256)) * 2000 + b"no newline at the end"
    assert done.returncode == 7, done.stderr
    head, _, report = done.stderr.rpartition(b"\n{")
    assert head == b"\xff\x00err"
    document = json.loads(b"{" + report)
    assert (document["id"], document["state"], document["reason"], document["exit_code"]) == (
        "w",
        "failed",
        "exit",
        7,
    )
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("command", "engine", "status"),
    [
        (["true"], {}, 0),
        (["sh", "-c", "exit 255"], {}, 255),
        (["sh", "-c", "kill -TERM $$"], {}, 128 + 15),
        (["true"], {"reason": "oom"}, 137),
        (["true"], {"reason": "no_capacity"}, 125),
        (["true"], {"reason": "incompatible"}, 125),
    ],
)
def test_run_and_wait_exit_with_the_code_of_the_reason(
    shell: Shell, tmp_path: Path, command, engine, status: int
):
    done = shell.run("run", "--name", "w", "--spec", spec_file(tmp_path, command, engine=engine))
    assert done.returncode == status, done.stderr
    assert shell("wait", "w").exit_code == status


def counts(number: int, until: Path) -> str:
    """A program that writes so many numbers and ends when there is the file."""
    return (
        f"import os, time\nfor i in range({number}): print(i, flush=True); time.sleep(.05)\n"
        f"while not os.path.exists({str(until)!r}): time.sleep(.05)"
    )


def test_run_says_important_events_in_plain_lines_where_there_is_no_terminal(shell: Shell, tmp_path: Path):
    process = shell.start(
        "run",
        "--name",
        "w",
        "--",
        sys.executable,
        "-c",
        counts(40, tmp_path / "end"),
    )
    shell.until("w", running)
    assert shell("preempt", "w", "--notice", "20s").output == "host-1 goes in 20s\n"
    shell.until("w", lambda record: len(record.incarnations) == 2 and running(record))
    (tmp_path / "end").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.split() == [str(i).encode() for i in range(40)]
    lines = err.decode().splitlines()
    assert all(line.startswith("savedworker: ") for line in lines)
    told = "\n".join(lines)
    for part in (
        "savedworker: worker w",
        "savedworker: notice from fake, 20s left",
        "savedworker: checkpoint 1-1 (notice) committed in",
        "savedworker: handed over at checkpoint 1-1",
        "savedworker: incarnation 2 on host-2 restores checkpoint 1-1",
        "savedworker: restored from checkpoint 1-1",
        "1 migration, ",
    ):
        assert told.count(part) == 1, told


def test_a_loss_without_notice_is_marked_in_the_output_and_counted_as_a_cold_start(
    shell: Shell, tmp_path: Path
):
    process = shell.start(
        "run",
        "--name",
        "w",
        "--json",
        "--",
        sys.executable,
        "-c",
        counts(30, tmp_path / "end"),
    )
    shell.until("w", running)
    time.sleep(1)
    shell("preempt", "w", "--no-notice")
    (tmp_path / "end").touch()
    out, err = process.communicate(timeout=60)
    lines = out.decode().splitlines()
    (mark,) = [
        n
        for n, line in enumerate(lines)
        if line.startswith("[savedworker] incarnation 1 ended without a last checkpoint")
    ]
    assert lines[:mark] == [str(i) for i in range(mark)]
    assert lines[mark + 1 :] == [str(i) for i in range(30)]
    assert process.returncode == 0, err
    document = json.loads(err.splitlines()[-1])
    assert (document["migrations"], document["cold_starts"]) == (0, 1)
    assert document["lost_seconds"] > 0
    assert shell.run("logs", "w").stdout == out


def test_the_first_interrupt_cancels_the_worker_and_run_waits_for_its_end(shell: Shell):
    process = shell.start("run", "--name", "w", "--", sys.executable, "-c", WAITS)
    shell.until("w", running)
    while shell.run("logs", "w").stdout != b"begun\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (125, b"begun\n")
    assert b"press Ctrl-C again" in err
    record = shell.record("w")
    assert record.state == "cancelled"
    assert record.lease is not None
    assert record.lease.released
    assert b"w cancelled by " in err


def test_a_second_interrupt_detaches_and_says_how_to_follow(shell: Shell, tmp_path: Path):
    process = shell.start("run", "--name", "w", "--", sys.executable, "-c", WAITS)
    shell.until("w", running)
    for pid in _agents(tmp_path):
        os.kill(pid, signal.SIGSTOP)  # the cancel takes long
    process.send_signal(signal.SIGINT)
    shell.until("w", lambda record: record.state == "cancelled")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)  # and not the worker's 60 s
    assert process.returncode == 125
    assert (
        err.decode()
        .splitlines()[-1]
        .startswith(
            "savedworker: interrupted twice; worker w goes on. Fix: follow it with: savedworker logs -f w --store "
        )
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_hang_up_detach_and_never_cancel(shell: Shell, signum: signal.Signals):
    process = shell.start("run", "--name", "w", "--json", "--", sys.executable, "-c", WAITS)
    shell.until("w", running)
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 125
    assert json.loads(err)["code"] == "detached"
    time.sleep(0.5)
    assert shell.record("w").state == "running"


def test_a_closed_stdout_detaches_and_the_worker_runs_on(shell: Shell, tmp_path: Path):
    code = "import time\nwhile True: print('x' * 1000, flush=True); time.sleep(.02)"
    process = shell.start("run", "--name", "w", "--fleet", "fake-local", "--", sys.executable, "-c", code)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.wait(timeout=30) == 125
    assert process.stderr is not None
    assert b"nobody reads our output any more; worker w goes on" in process.stderr.read()
    assert shell.record("w").state == "running"
    assert log_file("w").exists()
    shell("cancel", "w")
    shell.until("w", lambda record: all(x.state == "ended" for x in record.launches))


def test_a_reader_that_does_not_read_holds_nothing_up(shell: Shell):
    code = "print('x' * 3000000, flush=True)\nimport time; time.sleep(2)"
    process = shell.start("run", "--name", "w", "--", sys.executable, "-c", code)
    record = shell.until("w", lambda record: record.state == "succeeded")
    assert record.exit_code == 0
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    assert process.returncode == 125


def test_running_the_same_again_follows_the_same_worker(shell: Shell, tmp_path: Path):
    words = [
        "run",
        "--name",
        "w",
        "--",
        sys.executable,
        "-c",
        counts(20, tmp_path / "end"),
    ]
    first = shell.start(*words)
    shell.until("w", running)
    first.kill()
    (tmp_path / "end").touch()
    second = shell.run(*words)
    assert second.returncode == 0
    assert second.stdout.split() == [str(i).encode() for i in range(20)]
    assert len(shell.record("w").incarnations) == 1


def test_another_spec_under_the_same_name_is_refused(shell: Shell):
    assert shell("submit", "--name", "w", "--", "true").exit_code == 0
    result = shell("submit", "--name", "w", "--", "false")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "exists already" in result.stderr
    assert shell("run", "--name", "w", "--", "false").exit_code == 125


def test_a_report_file_is_written_at_the_end(shell: Shell, tmp_path: Path):
    file = tmp_path / "report.json"
    done = shell.run("run", "--report", str(file), "--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert json.loads(file.read_text())["exit_code"] == 3
    assert shell("run", "--report", str(tmp_path / "no" / "x"), "--", "true").exit_code == 2


def test_submit_prints_the_id_alone_and_a_controller_in_the_background_sees_the_worker_to_its_end(
    shell: Shell, tmp_path: Path
):
    end = tmp_path / "end"
    words = ["sh", "-c", f"until [ -e {end} ]; do sleep .05; done; echo done"]
    done = shell.run("submit", "--fleet", "fake-local", "--", *words)
    worker = done.stdout.decode().strip()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{worker}\n".encode(), b"")
    shell.until(worker, running)
    shell("preempt", worker, "--notice", "20")
    shell.until(worker, lambda r: len(r.incarnations) == 2 and running(r))
    end.touch()
    record = shell.until(
        worker, lambda r: r.state == "succeeded" and all(x.state == "ended" for x in r.launches)
    )
    assert (record.migrations, record.exit_code) == (1, 0)
    assert shell.run("logs", worker).stdout == b"done\n"
    for _ in range(300):
        if f"{worker}: succeeded" in log_file(worker).read_text():
            break
        time.sleep(0.1)
    else:
        raise AssertionError(log_file(worker).read_text())


def test_wait_brings_workers_on_and_exits_with_the_first_failure_in_the_order_given(shell: Shell):
    for name, code in (("a", 0), ("b", 4), ("c", 5)):
        shell("submit", "--name", name, "--", "sh", "-c", f"exit {code}")
    done = shell.run("wait", "a", "c", "b")
    assert done.returncode == 5
    assert [line.split()[0] for line in done.stdout.decode().splitlines()] == ["a", "c", "b"]
    again = shell.run("wait", "a", "b", "--json")
    assert again.returncode == 4
    assert [s["exit_code"] for s in json.loads(again.stdout)] == [0, 4]


def test_wait_gives_up_with_124_when_the_time_runs_out(shell: Shell):
    shell("submit", "--name", "w", "--", "sleep", "60")
    begin = time.monotonic()
    done = shell.run("wait", "w", "--timeout", "1.5s")
    assert done.returncode == 124
    assert time.monotonic() - begin >= 1.5
    assert not shell.record("w").state.terminal
    assert b"still going: w" in done.stderr
    assert json.loads(shell.run("wait", "w", "--timeout", "0", "--json").stdout)[0]["state"] in (
        "pending",
        "starting",
        "running",
    )


def test_logs_follow_until_the_worker_has_ended(shell: Shell):
    shell(
        "submit", "--name", "w", "--", "sh", "-c", "for i in 1 2 3; do echo $i; echo e$i >&2; sleep .4; done"
    )
    follower = shell.start("logs", "-f", "w")
    assert shell.run("wait", "w").returncode == 0
    assert follower.communicate(timeout=20) == (b"1\n2\n3\n", b"e1\ne2\ne3\n")
    assert shell.run("logs", "w", "--stream", "stderr").stderr == b"e1\ne2\ne3\n"
    assert shell.run("logs", "w", "--stream", "stderr").stdout == b""
    pieces = [json.loads(line) for line in shell.run("logs", "w", "--json").stdout.splitlines()]
    assert "".join(p["text"] for p in pieces if p["stream"] == "stdout") == "1\n2\n3\n"


def test_checkpoint_prints_its_number_and_a_failure_says_why(shell: Shell, tmp_path: Path):
    shell("submit", "--name", "good", "--", "sleep", "60")
    shell(
        "submit",
        "--name",
        "bad",
        "--spec",
        spec_file(tmp_path, ["sleep", "60"], engine={"checkpoint": "fails"}),
    )
    for name in ("good", "bad"):
        shell.client.reconcile(name)
        shell.until(name, running)
    assert shell("checkpoint", "good").output == "1-1\n"
    assert shell.json("checkpoint", "good") == {"id": "good", "number": "1-2"}
    failed = shell("checkpoint", "bad")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "holds /dev/fuse" in failed.stderr
    assert shell.json("status", "good", "bad")[0]["last_checkpoint"]["number"] == "1-2"


def test_a_drill_needs_one_kind_of_notice_and_a_running_worker(shell: Shell):
    shell("submit", "--name", "w", "--", "true")
    shell.run("wait", "w")
    assert shell("preempt", "w", "--notice", "3s", "--no-notice").exit_code == 2
    assert shell("preempt", "w").exit_code == 1


def test_cancel_ends_the_worker_and_may_be_said_again(shell: Shell):
    shell("submit", "--name", "w", "--", "sleep", "60")
    shell.until("w", running)
    assert shell("cancel", "w").output == "w is cancelled\n"
    assert shell.run("wait", "w").returncode == 125
    assert shell("cancel", "w").output == "w had ended already: cancelled\n"
    assert shell.json("cancel", "w")["state"] == "cancelled"


def test_a_controller_brings_every_worker_to_its_end_and_survives_one_that_it_cannot_read(shell: Shell):
    for n in range(6):
        shell("submit", "--name", f"w{n}", "--", "sh", "-c", "sleep .5")
    broken = shell.store / "workers" / "w3" / "spec.json"
    broken.write_text("{")
    done = shell.run(
        "controller", "--until-idle", *[w for n in range(6) if n != 3 for w in ("--worker", f"w{n}")]
    )
    assert done.returncode == 0, done.stderr
    controller = shell.start("controller", "--json")
    assert controller.stderr is not None
    begun = controller.stderr.readline()
    assert b"controlling 6 workers" in begun
    shell("submit", "--name", "late", "--", "true")
    shell.until("late", lambda record: record.state == "succeeded")
    controller.send_signal(signal.SIGTERM)
    _, err = controller.communicate(timeout=15)
    assert controller.returncode == 0
    messages = [json.loads(line)["message"] for line in err.splitlines()]
    assert any("w3" in message for message in messages)
    assert messages[-1] == "stopping; the workers go on"


def test_two_controllers_and_a_run_do_not_disturb_each_other(shell: Shell):
    controllers = [shell.start("controller") for _ in range(2)]
    done = shell.run("run", "--name", "w", "--", "sh", "-c", "sleep 1; echo once")
    assert (done.returncode, done.stdout) == (0, b"once\n")
    record = shell.record("w")
    assert len(record.incarnations) == 1
    assert [x.outcome for x in record.launches] == ["used"]
    for controller in controllers:
        controller.terminate()
        assert controller.wait(timeout=15) == 0


def test_much_output_arrives_whole(shell: Shell):
    code = "import os\nfor i in range(200): os.write(1, (b'%07d\\n' % i) * 5000)"
    done = shell.run("run", "--json", "--", sys.executable, "-c", code)
    wanted = b"".join((b"%07d\n" % i) * 5000 for i in range(200))
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(wanted).digest()


def _agents(tmp_path: Path) -> list[int]:
    return [int(file.read_text()) for file in (tmp_path / "fleet").glob("l-*.pid")]


def test_the_command_runs_as_a_module_and_tells_its_version(shell: Shell):
    done = subprocess.run(
        [sys.executable, "-m", "savedworker.cli", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("savedworker 0.")


def test_a_worker_that_vanishes_from_the_store_ends_run_and_wait(shell: Shell, tmp_path: Path):
    process = shell.start("run", "--name", "w", "--", "sleep", "60")
    shell.until("w", running)
    waiter = shell.start("wait", "w", "--json")
    threads = Path(f"/proc/{waiter.pid}/task")
    while len(list(threads.iterdir())) < 2:  # it reconciles in others, once it has found the worker
        assert waiter.poll() is None
        time.sleep(0.05)
    (shell.store / "workers" / "w").rename(tmp_path / "away")  # at once, while others write there
    for one in (process, waiter):
        out, err = one.communicate(timeout=20)
        assert (one.returncode, out) == (125, b""), err
        assert b"there is no worker w" in err
