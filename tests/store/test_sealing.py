"""With a key configured nothing readable leaves the instance, and nothing altered, foreign or moved is taken back."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model.errors import AlreadyExists, Corrupt, NoKey, NotFound, Refused, SavedWorkerError
from savedworker.store import logs
from savedworker.store.backend import Store, open_store
from savedworker.store.chunks import ChunkStore, decode, encode
from savedworker.store.sealing import NO_KEY, PLAIN, Sealed, Sealer, Sealing, key_id, sealing_from_environment
from savedworker.store.worker import WorkerStore
from tests.hostile.material import MANIFEST, RECORD, SPEC, few
from tests.store.keys import key, key_file, sealing

SECRET = b"correct horse battery staple"


@pytest.fixture
def keyed(url: str) -> Store:
    """A store of each kind, with a key."""
    return open_store(url, timeout=10, sealing=sealing(key()))


@pytest.fixture
def worker(keyed: Store) -> WorkerStore:
    keyed.ensure()
    made = WorkerStore(keyed, "w")
    made.create_spec(SPEC)
    made.create_record(RECORD)
    return made


def opened_with(store: Store, how: Sealing) -> WorkerStore:
    return WorkerStore(open_store(store.url, timeout=10, sealing=how), "w")


def everything(store: Store) -> dict[str, bytes]:
    return {info.key: store.get(info.key).data for info in store.list()}


def sealer(worker_id: str = "w") -> Sealer:
    return sealing(key()).begin(worker_id)


def test_what_is_stored_of_a_sealed_worker_comes_back_and_tells_nothing(worker: WorkerStore) -> None:
    name = worker.chunks.put(SECRET * 1000)
    worker.publish_manifest(MANIFEST)
    logs.LogWriter(worker, "stdout", 1, 0).append(SECRET + b"\n")
    worker.keep_engine_note("airflow", SECRET)
    again = opened_with(worker.store, worker.store.sealing)
    assert again.load_spec() == SPEC
    assert again.chunks.get(name) == SECRET * 1000
    assert again.load_manifest("1-1") == MANIFEST
    assert again.load_engine_note("airflow") == SECRET
    (text,) = logs.read(again, "stdout")
    assert isinstance(text, logs.Text)
    assert text.data == SECRET + b"\n"
    stored = everything(worker.store)
    assert len(stored) == 8
    for at, data in stored.items():
        assert SECRET not in data, at
        if at not in ("workers/w/record.json", "workers/w/clock"):
            assert not any(word in data for word in (b"/bin/true", b"files.img", b"/usr/lib/a.so")), at


def test_equal_content_is_stored_once_within_a_worker_and_has_another_name_in_each(keyed: Store) -> None:
    first, second = (ChunkStore(keyed, name, sealer=sealer(name)) for name in ("w", "other"))
    data = os.urandom(5000)
    assert first.put(data) == first.put(bytes(data)) == first.key(data)
    assert first.chunks_uploaded == 1
    assert len({first.key(data), second.key(data), PLAIN.chunk_name(data)}) == 3


def test_a_worker_made_again_under_its_name_has_other_keys(keyed: Store) -> None:
    one, two = (keyed.sealing.begin("w") for _ in range(2))
    assert one.chunk_name(b"x") != two.chunk_name(b"x")
    with pytest.raises(Corrupt):
        two.open("manifest", "k", one.seal("manifest", "k", b"x"))


def test_a_manifest_published_twice_is_one_and_another_one_is_refused(worker: WorkerStore) -> None:
    for _ in range(2):
        worker.publish_manifest(MANIFEST)
    with pytest.raises(AlreadyExists):
        worker.publish_manifest(MANIFEST.model_copy(update={"bytes_image": 5}))


def test_an_agent_that_was_restarted_goes_on_with_a_sealed_log(worker: WorkerStore) -> None:
    logs.LogWriter(worker, "stdout", 1, 0).append(b"one\ntwo\n")
    again = opened_with(worker.store, worker.store.sealing)
    logs.LogWriter(again, "stdout", 1, 0).append(b"one\ntwo\nthree\n")
    assert b"".join(x.data for x in logs.read(worker, "stdout") if isinstance(x, logs.Text)) == (
        b"one\ntwo\nthree\n"
    )
    with pytest.raises(SavedWorkerError, match="another agent writes there"):
        logs.LogWriter(again, "stdout", 1, 0).append(b"ONE\n")


def test_discarded_lines_are_counted_in_a_sealed_log_as_in_a_plain_one(worker: WorkerStore) -> None:
    writer = logs.LogWriter(worker, "stdout", 1, 0)
    for piece in (b"1\n2\n", b"3\n", b"4\n5"):
        writer.append(piece)
    logs.LogWriter(worker, "stdout", 2, 4).append(b"3\n")
    (mark,) = (x for x in logs.read(worker, "stdout", logs.Cursor(1, 9)) if isinstance(x, logs.Mark))
    assert (mark.discarded_bytes, mark.discarded_lines, mark.mid_line) == (5, 3, True)


@few
@given(st.binary(max_size=3000), st.integers(1, 40))
def test_any_bytes_come_back_from_a_chunk_and_from_an_object(data: bytes, times: int) -> None:
    mine = sealer()
    for content in (data, data * times):
        name = mine.chunk_name(content)
        stored = encode(content, name, mine)
        assert decode(name, stored, sealer=mine) == content
        assert len(stored) <= len(content) + 16 + mine.chunk_overhead
    assert mine.open("log", "k", mine.seal("log", "k", data)) == data
    assert len(mine.seal("log", "k", data)) == len(data) + mine.overhead


def test_the_same_content_is_never_sealed_into_the_same_bytes() -> None:
    mine = sealer()
    assert (
        len({encode(b"x", "n", mine) for _ in range(50)} | {mine.seal("log", "k", b"x") for _ in range(50)})
        == 100
    )


# Which key


def test_after_a_rotation_old_workers_open_with_the_old_key_and_new_ones_have_the_new(
    worker: WorkerStore,
) -> None:
    old, new = key(), key(2)
    rotated = opened_with(worker.store, sealing(new, old))
    assert rotated.load_spec() == SPEC
    later = WorkerStore(rotated.store, "later")
    later.create_spec(SPEC.model_copy(update={"id": "later"}))
    assert isinstance(later.sealer, Sealed)
    assert later.sealer.label == key_id(new)
    assert isinstance(rotated.sealer, Sealed)
    assert rotated.sealer.label == key_id(old)
    only_old = WorkerStore(open_store(worker.store.url, timeout=10, sealing=sealing(old)), "later")
    with pytest.raises(NoKey):
        only_old.load_spec()


def test_a_rotation_reaches_a_program_that_runs(tmp_path: Path) -> None:
    file = key_file(tmp_path / "key", key())
    store = open_store(
        str(tmp_path / "store"), sealing=sealing_from_environment({"SAVEDWORKER_KEY_FILE": str(file)})
    )
    key_file(file, key(2), key())
    store.ensure()
    worker = WorkerStore(store, "w")
    worker.create_spec(SPEC)
    assert isinstance(worker.sealer, Sealed)
    assert worker.sealer.label == key_id(key(2))


def test_without_the_key_the_record_can_be_read_and_all_else_says_which_key_is_missing(
    worker: WorkerStore,
) -> None:
    worker.publish_manifest(MANIFEST)
    logs.LogWriter(worker, "stdout", 1, 0).append(b"x")
    for how, what in (
        (NO_KEY, "no key is configured here"),
        (sealing(key(2), key(3)), f"SAVEDWORKER_KEY holds {key_id(key(2))} {key_id(key(3))}"),
    ):
        blind = opened_with(worker.store, how)
        assert blind.load_record().record.id == "w"
        for call in (
            blind.load_spec,
            lambda blind=blind: blind.load_manifest("1-1"),
            lambda blind=blind: blind.chunks,
            lambda blind=blind: list(logs.read(blind, "stdout")),
            lambda blind=blind: logs.LogWriter(blind, "stdout", 2, 0),
            lambda blind=blind: blind.publish_manifest(MANIFEST),
            lambda blind=blind: blind.load_engine_note("airflow"),
        ):
            with pytest.raises(NoKey) as caught:
                call()
            assert key_id(key()) in caught.value.message
            assert what in caught.value.message
            assert "\n" not in str(caught.value)
            assert "docs/encryption.md" in caught.value.fix


def test_another_master_key_under_the_same_label_opens_nothing(worker: WorkerStore) -> None:
    class Liar:
        def find(self, label: str, worker_id: str) -> bytes:
            return key(2)

    with pytest.raises(Corrupt):
        opened_with(worker.store, Sealing(Liar())).load_spec()  # type: ignore[arg-type]


def test_workers_made_before_there_was_a_key_are_read_but_executed_only_where_that_is_allowed(
    url: str,
) -> None:
    plain = WorkerStore(open_store(url, timeout=10, sealing=NO_KEY), "w")
    plain.store.ensure()
    plain.create_spec(SPEC)
    name = plain.chunks.put(b"memory")
    logs.LogWriter(plain, "stdout", 1, 0).append(b"line\n")
    keyed = opened_with(plain.store, sealing(key()))
    assert keyed.load_spec() == SPEC
    assert keyed.chunks.get(name) == b"memory"
    assert [x.data for x in logs.read(keyed, "stdout") if isinstance(x, logs.Text)] == [b"line\n"]
    logs.LogWriter(keyed, "stdout", 2, 5).append(b"more\n")  # the worker stays what it was made as
    assert plain.chunks.get(keyed.chunks.put(b"more")) == b"more"
    with pytest.raises(Refused, match=r"made without a key.*SAVEDWORKER_ALLOW_PLAIN=1"):
        keyed.refuse_plain()
    opened_with(plain.store, Sealing(sealing(key()).ring, allow_plain=True)).refuse_plain()
    plain.refuse_plain()


def test_a_worker_that_does_not_exist_is_not_taken_for_a_plain_one(keyed: Store) -> None:
    keyed.ensure()
    with pytest.raises(NotFound):
        WorkerStore(keyed, "nobody").chunks


# Where keys come from


def test_keys_come_from_a_file_or_a_variable_and_name_themselves_without_telling(tmp_path: Path) -> None:
    file = key_file(tmp_path / "key", key(), key(2))
    text = base64.b64encode(key()).decode()
    assert sealing_from_environment({}) == NO_KEY
    for environ in ({"SAVEDWORKER_KEY_FILE": str(file)}, {"SAVEDWORKER_KEY": text}):
        found = sealing_from_environment(environ)
        assert found.ring is not None
        assert found.ring.begin("w") == (key_id(key()), key())
        assert found.environment() == environ
        assert key_id(key()) in found.ring.describe()
        for shown in (repr(found), found.ring.describe(), repr(found.begin("w")), key_id(key())):
            assert text not in shown
            assert key().hex()[:8] not in shown
            assert repr(key())[2:-1] not in shown
    given = sealing_from_environment(
        {"SAVEDWORKER_KEY": base64.b64encode(key(3)).decode()}, key_file=str(file)
    )
    assert given.ring is not None
    assert given.ring.begin("w")[1] == key()
    assert given.ring.files() == (file,)


def test_comments_and_empty_lines_of_a_key_file_are_left_out(tmp_path: Path) -> None:
    file = key_file(tmp_path / "key", key())
    file.write_text(
        f"# since March\n\n{file.read_text()}\n   # the one before\n{base64.b64encode(key(2)).decode()}\n\n"
    )
    ring = sealing_from_environment({"SAVEDWORKER_KEY_FILE": str(file)}).ring
    assert ring is not None
    assert [ring.find(key_id(each), "w") for each in (key(), key(2))] == [key(), key(2)]


@pytest.mark.parametrize(
    ("content", "mode", "what"),
    [
        (None, 0o600, "No such file"),
        (b"", 0o600, "holds no key"),
        (b"# nothing\n", 0o600, "holds no key"),
        (b"short\n", 0o600, "key 1 of .* is not 32 bytes"),
        (
            base64.b64encode(bytes(32)) + b"\n" + base64.b64encode(bytes(31)),
            0o600,
            "key 2 of .* is not 32 bytes",
        ),
        (b"!" * 44, 0o600, "is not 32 bytes in base64"),
        (b"\xff\xfe" * 20, 0o600, "not a key file"),
        (b"x" * 70_000, 0o600, "not a key file"),
        (base64.b64encode(bytes(32)), 0o640, "mode 0640: others may get at it.*chmod 600"),
        (base64.b64encode(bytes(32)), 0o604, "mode 0604"),
        (base64.b64encode(bytes(32)), 0o620, "mode 0620"),
    ],
)
def test_a_bad_key_file_is_one_line_with_cause_and_fix_and_never_its_content(
    tmp_path: Path, content: bytes | None, mode: int, what: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(Refused, match=what) as caught:
        sealing_from_environment({"SAVEDWORKER_KEY_FILE": str(file)})
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    assert not content or content[:12].decode("latin-1") not in str(caught.value)


def test_a_folder_or_fifo_is_no_key_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(Refused):
            sealing_from_environment({"SAVEDWORKER_KEY_FILE": str(path)})


@pytest.mark.parametrize(
    "environ",
    [
        {"SAVEDWORKER_KEY": "nonsense"},
        {"SAVEDWORKER_KEY": base64.b64encode(bytes(32)).decode(), "SAVEDWORKER_KEY_FILE": "/etc/key"},
        {"SAVEDWORKER_ALLOW_PLAIN": "yes"},
    ],
)
def test_a_bad_setting_is_refused_when_the_store_is_opened(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused) as caught:
        open_store(str(tmp_path))
    assert "nonsense" not in str(caught.value)


# The format


def test_what_was_sealed_by_an_earlier_release_opens() -> None:
    """Written by the first release that sealed; who changes the format or the derivation of keys makes a new version."""
    mine = Sealed("w", key_id(key()), bytes(range(32)), key())
    assert key_id(key()) == "51b7d26704fefc30"
    assert mine.chunk_name(b"content") == "f8113a0a14cf341427265e1440f720188438e123f9c7bf09e79926b2120ae229"
    spec = bytes.fromhex(
        "5357534501003000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f3531623764323637303466656663"
        "33309d54569b783af08f44b9febf2c7ab59e09184651b3be936290a01709999d"
    )
    assert (
        sealing(key()).find("w", "workers/w/spec.json", spec).open("spec", "workers/w/spec.json", spec)
        == b"{}"
    )
    piece = bytes.fromhex(
        "535753450100000082e78fe85e48f9b3311e08f896306f16787102b1af65eb949adb8312ead1aa9ece"
    )
    assert mine.open("log", "k", piece) == b"line\n"
    chunk = bytes.fromhex(
        "53574348010101003f000000000000008d80d41d6839b442267886879ccfbdf795acfed556ade83365c6261d49d9fbb72be2d197357f"
        "7fd65dd52ff609543acb4eee"
    )
    assert decode(mine.chunk_name(b"content" * 9), chunk, sealer=mine) == b"content" * 9


def test_kind_place_and_header_are_each_authenticated() -> None:
    """Each by itself, whatever else would notice."""
    mine = sealer()
    good = mine.seal("manifest", "k", b"x")
    for kind, at in (("spec", "k"), ("engine", "k"), ("log", "k"), ("manifest", "j")):
        with pytest.raises(Corrupt):
            mine.open(kind, at, good)  # type: ignore[arg-type]
    body = b"".join(mine.seal_chunk("name", b"header", b"x"))
    assert mine.open_chunk("name", b"header", body) == b"x"
    for name, header in (("eman", b"header"), ("name", b"Header"), ("nam", b"eheader")):
        with pytest.raises(Corrupt):
            mine.open_chunk(name, header, body)


def test_a_piece_of_the_log_may_be_as_long_sealed_as_plain(tmp_path: Path) -> None:
    worker = WorkerStore(open_store(str(tmp_path), sealing=sealing(key())), "w")
    worker.create_spec(SPEC)
    logs.LogWriter(worker, "stdout", 1, 0).append(bytes(logs.MAX_PIECE))
    (text,) = logs.read(worker, "stdout")
    assert isinstance(text, logs.Text)
    assert len(text.data) == logs.MAX_PIECE
