"""What somebody deletes or truncates in the store while its writer lives, the next periodic checkpoint puts again."""

from __future__ import annotations

import pytest

from savedworker.checkpoint.memory import Keep
from savedworker.model.errors import Corrupt
from tests.checkpoint.bench import Bench

pytestmark = pytest.mark.criu

HOLDS = """
import hashlib, os, time
data = os.urandom(24 << 20)
with open("/srv/kept", "wb") as file:
    file.write(os.urandom(6 << 20))
def digest():
    with open("/srv/kept", "rb") as file:
        return hashlib.sha256(data).hexdigest(), hashlib.file_digest(file, "sha256").hexdigest()
first = digest()
while True:
    print("same", digest() == first, flush=True)
    time.sleep(0.1)
"""


def test_a_periodic_checkpoint_relies_on_no_chunk_that_has_gone_or_lost_its_end(bench: Bench) -> None:
    bench.python(HOLDS, interpreter="/usr/bin/python3")
    bench.until_output("same True\n")
    first = bench.save()
    bench.chunks.keep(first.keys)
    assert first.mended == 0
    groups = [group.key for group in max(first.manifest.memory, key=lambda x: x.size).groups]
    of_files = sorted(first.keys - set(first.manifest.chunk_keys()))
    files = {path.name: path for path in bench.folder.glob("store/workers/*/chunks/*")}
    files[groups[0]].unlink()
    files[groups[1]].write_bytes(files[groups[1]].read_bytes()[:-100])
    files[of_files[0]].unlink()
    with pytest.raises(Corrupt):
        bench.chunks.get(groups[0])
    second = bench.save()
    bench.chunks.keep(second.keys)
    assert second.mended == 3
    assert {groups[0], groups[1], of_files[0]} <= second.keys
    for key in second.keys:
        bench.chunks.get(key)
    assert bench.save().mended == 0
    bench.restore()
    bench.writes_on()
    assert "same False" not in bench.text


def test_what_a_running_worker_reads_and_finds_damaged_its_next_checkpoint_puts_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of the base could not be kept in a restore is fetched beside the worker. Its chunks were whole a moment ago."""
    monkeypatch.setattr(Keep, "offer", lambda *_: None)
    bench.python(HOLDS, interpreter="/usr/bin/python3")
    bench.until_output("same True\n")
    bench.save()
    came = bench.restore()
    bench.chunks.keep(came.keys)
    assert bench.manifest is not None
    groups = [x.key for x in max(bench.manifest.memory, key=lambda x: x.size).groups]
    dense = max(groups, key=lambda key: len(bench.chunks.get(key)))
    (file,) = bench.folder.glob(f"store/workers/*/chunks/{dense}")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    bench.saver.warm_now()
    assert file.read_bytes() == whole, "what was read ahead relies on it"
    second = bench.save()
    for key in second.keys:
        bench.chunks.get(key)
    bench.restore()
    bench.writes_on()
    assert "same False" not in bench.text
