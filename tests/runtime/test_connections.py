"""Connections: those inside the worker survive every move, those that leave it are left alone until it moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.model.record import State
from tests.runtime.experiments import Experiments
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.peer import Peer
from tests.runtime.world import BRIDGE, World


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer(BRIDGE)
    try:
        yield made
    finally:
        made.close()


def succeeded(world: World, worker: str) -> str:
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, f"{world.output(worker, 'stderr')[-2000:]}\n{world.story(worker)}"
    assert record.cold_starts == 0, world.story(worker)
    return world.output(worker)


OUTSIDE = (
    PRELUDE
    + """
import socket, threading
address = (sys.argv[1], int(sys.argv[2]))
def connect(name):
    sock = socket.create_connection(address)
    sock.sendall(f"hello {name}\\n".encode())
    assert sock.recv(100) == f"hello {name}\\n".encode()
    return sock
def end(name, sock, began):
    # whatever waits in recv: says how it ended, by the clock that does not stand still while frozen
    try:
        data = sock.recv(100)
        say(name, "EOF" if data == b"" else data)
    except OSError as error:
        say(name, "error", type(error).__name__, "after", round(time.monotonic() - began[0], 1))
began = [0.0]
busy, idle, asked = connect("busy"), connect("idle"), connect("asked")
threading.Thread(target=end, args=("idle", idle, began)).start()
def chat():
    stream = busy.makefile("rwb", buffering=0)
    number = 0
    try:
        while closed("quiet"):
            number += 1
            began[0] = time.monotonic()
            stream.write(f"busy {number}\\n".encode())
            answer = stream.readline()
            if answer != f"busy {number}\\n".encode():
                say("busy", "EOF" if answer == b"" else answer)
                return
            if number % 20 == 0:
                say("chat", number)
            time.sleep(0.01)
        say("busy", "undisturbed")
    except OSError as error:
        say("busy", "error", type(error).__name__, "after", round(time.monotonic() - began[0], 1))
threading.Thread(target=chat).start()
say("connected")
wait_for("ask")
try:
    asked.sendall(b"still there\\n")
    answer = asked.recv(100)
    say("asked", "EOF" if answer == b"" else answer)
except OSError as error:
    say("asked", "error", type(error).__name__)
wait_for("again")
again = connect("again")
say("connected again")
wait_for("end")
os._exit(0)
"""
)


def test_outside_connections_live_undisturbed_through_ten_checkpoints(
    world: World, gate: Gate, peer: Peer
) -> None:
    worker = world.python(OUTSIDE, BRIDGE, str(peer.port), volumes=(gate.volume,), interval=0.5)
    world.until_output(worker, "connected")
    world.until(
        worker, lambda r: [c for c in r.checkpoints if int(c.number.split("-")[1]) >= 8], "take 8 checkpoints"
    )
    world.checkpoint(worker)
    world.checkpoint(worker)
    gate.open("ask")
    world.until_output(worker, "asked b'still there\\n'")
    gate.open("quiet")
    world.until_output(worker, "busy undisturbed")
    assert [talk.end for talk in peer.talks] == [None, None, None]
    busy = next(talk for talk in peer.talks if talk.lines[0] == "hello busy")
    assert busy.lines[1:] == [f"busy {n}" for n in range(1, len(busy.lines))]
    assert world.record(worker).incarnation.number == 1  # type: ignore[union-attr]
    gate.open("again")
    world.until_output(worker, "connected again")
    gate.open("end")
    output = succeeded(world, worker)
    assert "idle" not in output, "the idle connection ended before the worker did"


@pytest.mark.parametrize("notice", [60.0, None])
def test_after_a_move_outside_connections_end_with_an_error_at_both_ends_and_never_with_a_clean_end(
    world: World, gate: Gate, peer: Peer, notice: float | None
) -> None:
    worker = world.python(OUTSIDE, BRIDGE, str(peer.port), volumes=(gate.volume,))
    world.until_output(worker, "chat 20")
    if notice is None:
        world.checkpoint(worker)
    world.preempt(worker, notice)
    world.until_output(worker, "idle error")
    world.until_output(worker, "busy error")
    gate.open("ask")
    world.until_output(worker, "asked error")
    if notice is not None:  # a machine that was lost cannot tell anybody
        world.until(worker, lambda _: all(t.end for t in peer.talks), "tell the peer")
        assert {t.end for t in peer.talks} == {"ConnectionResetError"}
    gate.open("again")
    world.until_output(worker, "connected again")
    gate.open("end")
    output = succeeded(world, worker)
    assert "EOF" not in output
    for line in output.splitlines():
        if " error " in line and " after " in line:
            assert float(line.split()[-1]) < 5.0, line


INSIDE = (
    PRELUDE
    + """
import socket, threading
pairs = {}
listeners = {}
for name, family, host in (
    ("loopback4", socket.AF_INET, "127.0.0.1"),
    ("loopback6", socket.AF_INET6, "::1"),
    ("inner4", socket.AF_INET, sys.argv[1]),
    ("inner6", socket.AF_INET6, sys.argv[2]),
):
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen()
    client = socket.socket(family)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    server.sendall(b"unread while moving")
    listeners[name], pairs[name] = listener, (client, server)
every = socket.create_server(("0.0.0.0", 7777))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
local = socket.socketpair()
local[0].sendall(b"kept")
say("ready")
for move in range(1, 4):
    wait_for(f"moved-{move}")
    for name, (client, server) in pairs.items():
        assert client.recv(100) == b"unread while moving", name
        client.sendall(b"ping")
        assert server.recv(100) == b"ping", name
        server.sendall(b"unread while moving")
        fresh = socket.socket(listeners[name].family)
        fresh.connect(listeners[name].getsockname())
        accepted, _ = listeners[name].accept()
        accepted.sendall(b"new")
        assert fresh.recv(100) == b"new", name
    fresh = socket.create_connection(("127.0.0.1", 7777))
    every.accept()[0].close()
    udp.sendto(b"x", udp.getsockname())
    assert udp.recv(10) == b"x"
    assert local[1].recv(10) == b"kept"
    local[0].sendall(b"kept")
    say("all well", move)
wait_for("end")
"""
)


def test_connections_inside_the_worker_survive_three_moves(world: World, gate: Gate) -> None:
    worker = world.python(INSIDE, "198.19.255.2", "fd5a:7e0d::2", volumes=(gate.volume,))
    world.until_output(worker, "ready")
    for move in range(1, 4):
        if move == 2:
            world.checkpoint(worker)
        world.preempt(worker, notice=None if move == 2 else 60)
        gate.open(f"moved-{move}")
        world.until_output(worker, f"all well {move}")
    gate.open("end")
    succeeded(world, worker)
    assert world.record(worker).migrations == 3


RETRYING = (
    PRELUDE
    + """
import socket
address = (sys.argv[1], int(sys.argv[2]))
sock = None
for number in range(1, 400):
    while True:
        try:
            sock = sock or socket.create_connection(address, timeout=10)
            sock.sendall(f"{number}\\n".encode())
            answer = b""
            while not answer.endswith(b"\\n"):
                part = sock.recv(100)
                if not part:
                    say("EOF")
                    sys.exit(3)
                answer += part
            break
        except OSError:
            say("again", number)
            sock = None
    if number % 50 == 0:
        say("at", number)
    if number == 350:
        wait_for("more")
    time.sleep(0.01)
say("done")
"""
)


def test_a_client_with_ordinary_retries_finishes_across_moves(world: World, gate: Gate, peer: Peer) -> None:
    worker = world.python(RETRYING, BRIDGE, str(peer.port), volumes=(gate.volume,))
    world.until_output(worker, "at 50\n")
    world.preempt(worker, notice=60)
    gate.open("more")
    output = succeeded(world, worker)
    assert output.endswith("done\n")
    assert output.count("again") == 1
    numbers = [int(line) for talk in peer.talks for line in talk.lines]
    assert sorted(set(numbers)) == list(range(1, 400))
    assert len(numbers) <= 400, "only the request in flight may be repeated"


TRACKED = (
    PRELUDE
    + """
import http.client, json, queue, threading
waiting = queue.Queue()
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=10)
def post(path, **body):
    while True:
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            return json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            connection.close()  # the next request opens it anew
            say("again")
def send(run):
    while (step := waiting.get()) is not None:
        post("/steps", run=run, step=step)
run = post("/register")["run"]
sender = threading.Thread(target=send, args=(run,))
sender.start()
for part in ("first", "second", "end"):
    for step in range(100):
        waiting.put({"first": 0, "second": 100, "end": 200}[part] + step)
        time.sleep(0.01)
        if step == 20:
            say(part, "is under way")
        if step == 60:
            wait_for(part)
waiting.put(None)
sender.join()
"""
)


def test_a_tracker_sees_one_run_with_each_step_of_a_thread_that_sends_them_beside_the_work(
    world: World, gate: Gate
) -> None:
    """C61: registered once, a connection that is kept, two moves. Only the request in flight may come twice."""
    tracker = Experiments()
    try:
        worker = world.python(TRACKED, BRIDGE, str(tracker.port), volumes=(gate.volume,))
        for part in ("first", "second"):
            world.until_output(worker, f"{part} is under way")
            world.preempt(worker, notice=60)
            gate.open(part)
        gate.open("end")
        succeeded(world, worker)
        assert world.record(worker).migrations == 2
        (steps,) = tracker.runs
        assert sorted(set(steps)) == list(range(300))
        assert steps == sorted(steps)
        assert len(steps) <= 302
        assert len(tracker.connections) == 3
    finally:
        tracker.close()


HOST_NETWORK = (
    PRELUDE
    + """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0))
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.sendall(b"hello\\n")
sock.recv(100)
waiting = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def wait():
    try:
        data = waiting.recv(100)
        say("waiting", "EOF" if data == b"" else data)
    except OSError as error:
        say("waiting error", type(error).__name__)
threading.Thread(target=wait, daemon=True).start()
say("connected")
wait_for("first")
sock.sendall(b"undisturbed\\n")
say("first", sock.recv(100))
wait_for("second")
try:
    sock.sendall(b"gone\\n")
    data = sock.recv(100)
    say("second", "EOF" if data == b"" else data)
except OSError as error:
    say("second error", type(error).__name__)
fresh = socket.create_connection(listener.getsockname())
listener.accept()[0].sendall(b"listening")
say(fresh.recv(100))
again = socket.create_connection((sys.argv[1], int(sys.argv[2])))
again.sendall(b"again\\n")
say("again", again.recv(100))
"""
)


def test_with_host_networking_a_worker_moves_and_its_old_connections_fail(
    world: World, gate: Gate, peer: Peer
) -> None:
    worker = world.python(HOST_NETWORK, BRIDGE, str(peer.port), volumes=(gate.volume,), network="host")
    world.until_output(worker, "connected")
    world.checkpoint(worker)
    gate.open("first")
    world.until_output(worker, "first b'undisturbed\\n'")
    world.preempt(worker, notice=60)
    gate.open("second")
    output = succeeded(world, worker)
    assert "second error" in output
    assert "waiting error" in output
    assert "EOF" not in output
    assert "b'listening'\nagain b'again\\n'\n" in output
    assert [talk.end for talk in peer.talks[:2]] == ["ConnectionResetError"] * 2


def test_names_are_looked_up_where_the_present_instance_looks_them_up(world: World, gate: Gate) -> None:
    program = (
        PRELUDE
        + "say(open('/etc/resolv.conf').read())\nsay('--')\nwait_for('end')\nsay(open('/etc/resolv.conf').read())\n"
    )
    worker = world.python(program, volumes=(gate.volume,))
    world.until_output(worker, "--\n")
    host = world.layer(worker).parent / "resolv.conf"
    assert "nameserver" in host.read_text()
    first = world.output(worker).split("--\n")[0].strip()
    assert first == host.read_text().strip()
    world.preempt(worker, notice=60)
    gate.open("end")
    assert succeeded(world, worker).split("--\n")[1].strip() == first
