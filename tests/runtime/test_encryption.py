"""With a key configured a worker moves as ever, and its store tells nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from savedworker.model.errors import Corrupt, NoKey
from savedworker.model.record import State
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore
from savedworker.store.sealing import NO_KEY, Sealed
from savedworker.store.worker import WorkerStore
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World
from tests.store.keys import key, key_file, text

PROGRAM = (
    PRELUDE
    + """
secret = sys.argv[1]
kept = (secret + " in memory ").encode() * 500
open("/tmp/kept", "w").write(secret + " in a file of the layer")
open("/dev/shm/kept", "w").write(secret + " in shared memory")
print(secret, "in the output", flush=True)
def look():
    for path in sys.argv[2:]:
        try:
            found = open(path).read() if not os.path.isdir(path) else os.listdir(path)
        except OSError as error:
            found = type(error).__name__
        print("saw", repr(found), flush=True)
    print("environment", sorted(x for x in os.environ if "SAVED" in x), flush=True)
look()
wait_for("look")
look()
wait_for("end")
print("ended with", len(kept), open("/dev/shm/kept").read(), flush=True)
"""
)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key file in a folder of its own, set for this process and so for the agents."""
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("SAVEDWORKER_KEY_FILE", str(key_file(folder / "key", key())))
    return folder


@pytest.fixture
def in_the_variable(monkeypatch: pytest.MonkeyPatch) -> str:
    """A key that no other test has, whose processes may run at the same time."""
    monkeypatch.setenv("SAVEDWORKER_KEY", made := text(secrets.token_bytes(32)))
    return made


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below ``folder``, and what its body is when a chunk's body is taken for compressed or for plain."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            yield str(path), data
            if data[:4] == b"SWCH":
                try:
                    body = zstandard.ZstdDecompressor().decompress(data[16:], max_output_size=64 << 20)
                except zstandard.ZstdError:
                    continue
                yield f"{path}, decompressed", body


def test_a_worker_with_a_key_moves_and_its_secrets_are_nowhere_in_the_store(
    keys: Path, world: World, tmp_path: Path
) -> None:
    secret = secrets.token_hex(16)
    gate = Gate(tmp_path / "gate")
    worker = world.python(
        PROGRAM, secret, str(keys), str(keys / "key"), env={"PASSWORD": secret}, volumes=(gate.volume,)
    )
    world.until_output(worker, "environment []\n")
    world.checkpoint(worker)
    world.preempt(worker, notice=20)
    gate.open("look")
    world.until(worker, lambda _: world.output(worker).count("environment") == 2, "look again")
    world.checkpoint(worker)
    world.preempt(worker, notice=None)
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert (record.migrations, record.cold_starts) == (2, 0)
    output = world.output(worker)
    assert f"{secret} in shared memory" in output

    # The worker saw neither the key nor its folder, before and after the moves.
    assert output.count("saw []\n") == 2
    assert "saw ['key']" not in output
    assert text(key()) not in output

    # The store holds the secret only for those who have the key.
    documents = WorkerStore(world.client.store, worker)
    spec = documents.load_spec()
    assert (spec.env["PASSWORD"], secret in spec.command) == (secret, True)
    assert isinstance(documents.sealer, Sealed)
    number = documents.list_checkpoints()[-1]
    manifest = documents.load_manifest(number)
    plain = b"".join(map(documents.chunks.get, manifest.chunk_keys()))
    assert f"{secret} in memory".encode() in plain
    unsealed = ChunkStore(open_store(str(tmp_path / "plain"), sealing=NO_KEY), "w")
    at = plain.index(f"{secret} in memory".encode())
    unsealed.put(plain[at : at + (1 << 20)])
    assert any(
        secret.encode() in data for _, data in contents(tmp_path / "plain")
    )  # so the search can find it
    store = world.folder / "store"
    looked_at = 0
    for where, data in contents(store):
        looked_at += 1
        for word in (secret, bytes.fromhex(secret).decode("latin-1"), text(key()), key().decode("latin-1")):
            assert word.encode("latin-1") not in data, where
    assert looked_at > 30
    with pytest.raises(NoKey):
        WorkerStore(open_store(world.client.store.url, sealing=NO_KEY), worker).load_spec()


def test_a_key_in_the_environment_is_in_no_argument_no_document_and_no_child_of_the_agent(
    in_the_variable: str, world: World
) -> None:
    worker = world.python("import time; print('runs', flush=True); time.sleep(600)")
    world.until_output(worker, "runs\n")
    world.checkpoint(worker)
    host = world.host(worker)
    assert host.agent_pid is not None
    # So the search below can find it.
    assert in_the_variable in Path(f"/proc/{host.agent_pid}/environ").read_text()
    pids = [int(x) for x in os.listdir("/proc") if x.isdigit()]
    knowing = {host.agent_pid, host.daemon_pid, os.getpid()}
    for pid in pids:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        assert in_the_variable.encode() not in arguments
        assert pid in knowing or in_the_variable.encode() not in environment, arguments
    for folder in (world.folder, host.directory):
        for where, data in contents(folder):
            assert in_the_variable.encode() not in data, where
    world.preempt(worker, notice=20)
    assert world.record(worker).migrations == 1


def test_an_altered_checkpoint_of_a_sealed_worker_is_passed_over_for_the_one_before(
    keys: Path, world: World
) -> None:
    (keys / "readme").write_text("for all")  # so that the file alone is hidden, not the folder
    worker = world.python(
        """
        import sys, time
        n = 0
        while True:
            n += 1
            print(n, repr(open(sys.argv[1]).read()), open(sys.argv[2]).read(), flush=True)
            time.sleep(0.05)
        """,
        str(keys / "key"),
        str(keys / "readme"),
    )
    world.until_output(worker, "5 '' for all\n")
    good = world.checkpoint(worker)
    bad = world.checkpoint(worker)
    checkpoints = world.folder / f"store/workers/{worker}/checkpoints"
    (checkpoints / bad / "manifest.json").write_bytes((checkpoints / good / "manifest.json").read_bytes())
    with pytest.raises(Corrupt):
        WorkerStore(world.client.store, worker).load_manifest(bad)
    world.preempt(worker, notice=None)
    report = world.report(worker)
    assert report.incarnations[1].restored_from == good, world.story(worker)
    failed = [e.detail for e in report.timeline if e.event == "restore_failed"]
    assert failed
    assert "is altered, or was sealed for another worker, place or key" in failed[0]
    restored = world.output(worker).count("\n")
    world.until(worker, lambda _: world.output(worker).count("\n") > restored + 5, "go on")
    assert text(key()) not in world.output(worker)
