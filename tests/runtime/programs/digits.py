"""Trains a small network on scikit-learn's digits. usage: digits.py COUNTER FOLDER SEED STEPS"""

import sys
import time
from pathlib import Path

import numpy as np
from posting import Posting  # type: ignore[import-not-found] # beside this file, which is run by its path
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

address, folder, seed, steps = sys.argv[1:]
posting = Posting(address)
out = Path(folder)
out.mkdir(parents=True, exist_ok=True)
random = np.random.default_rng(int(seed))
images, labels = load_digits(return_X_y=True)
images = images / 16.0
hidden, output = random.standard_normal((64, 32)) * 0.1, random.standard_normal((32, 10)) * 0.1
with (out / "losses.csv").open("w", buffering=1) as losses:
    for step in range(int(steps)):
        chosen = random.choice(len(images), 64, replace=False)
        x, y = images[chosen], labels[chosen]
        h = np.tanh(x @ hidden)
        scores = h @ output
        scores -= scores.max(axis=1, keepdims=True)
        p = np.exp(scores)
        p /= p.sum(axis=1, keepdims=True)
        losses.write(f"{step},{-np.log(p[np.arange(64), y]).mean():.17g}\n")
        p[np.arange(64), y] -= 1
        gradient = x.T @ ((p @ output.T) * (1 - h * h))
        output -= 0.01 * h.T @ p
        hidden -= 0.01 * gradient
        print(step, flush=True)
        posting.step(step)
        time.sleep(0.02)
np.savez(out / "weights.npz", hidden=hidden, output=output)
for name in ("losses.csv", "weights.npz"):
    posting.file(out / name)
