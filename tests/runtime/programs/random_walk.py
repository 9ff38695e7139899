"""A numpy random walk. usage: random_walk.py COUNTER FOLDER SEED STEPS [MEGABYTES]"""

import sys
import time
from pathlib import Path

import numpy as np
from posting import Posting  # type: ignore[import-not-found] # beside this file, which is run by its path

address, folder, seed, steps, *rest = sys.argv[1:]
posting = Posting(address)
out = Path(folder)
out.mkdir(parents=True, exist_ok=True)
random = np.random.default_rng(int(seed))
ballast = random.integers(0, 256, (int(rest[0]) << 20) if rest else 0, dtype=np.uint8)
position = np.zeros(1000)
with (out / "walk.csv").open("w", buffering=1) as trace:
    for step in range(int(steps)):
        position += random.standard_normal(1000)
        trace.write(f"{step},{position.mean():.17g},{position.std():.17g}\n")
        print(step, flush=True)
        posting.step(step)
        time.sleep(0.02)
np.save(out / "walk.npy", position)
(out / "ballast.txt").write_text(f"{ballast.sum()}\n")
for name in ("walk.csv", "walk.npy", "ballast.txt"):
    posting.file(out / name)
