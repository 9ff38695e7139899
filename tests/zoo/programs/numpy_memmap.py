"""numpy memory maps, shared and private, in the layer and in /dev/shm, also of a file that was deleted."""

import os

import numpy as np
from common import run

SIZE = 1 << 18
os.makedirs("/srv/zoo", exist_ok=True)
shared, private, files = {}, {}, {}
for folder in ("/srv/zoo", "/dev/shm"):
    files[folder] = f"{folder}/map-{os.getpid()}"
    np.arange(SIZE, dtype=np.int64).tofile(files[folder])
    shared[folder] = np.memmap(files[folder], dtype=np.int64, mode="r+")
    private[folder] = np.memmap(files[folder], dtype=np.int64, mode="c")
    private[folder][:1000] = -1
gone = np.memmap("/srv/zoo/gone", dtype=np.int64, mode="w+", shape=(SIZE,))
os.unlink("/srv/zoo/gone")
base = np.arange(SIZE, dtype=np.int64)


def check(n: int) -> None:
    for folder in files:
        assert int(shared[folder][1000]) == 1000 + n - 1, folder
        shared[folder][1000:] += 1
        assert np.array_equal(shared[folder][1000:], base[1000:] + n), f"the shared map in {folder} differs"
        assert np.array_equal(np.fromfile(files[folder], dtype=np.int64), shared[folder]), (
            f"file and map in {folder} differ"
        )
        assert (private[folder][:1000] == -1).all(), f"the private map in {folder} lost what was written"
        assert (np.fromfile(files[folder], dtype=np.int64, count=1000) == base[:1000]).all(), (
            "a private write reached the file"
        )
    gone[:] = n
    assert (gone == n).all()


run(check)
