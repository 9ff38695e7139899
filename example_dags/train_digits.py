"""An ordinary training program: it draws its seed, keeps everything in memory, and writes the model when it is done.

It writes no checkpoint, catches no signal and cannot resume. Environment: SEED (otherwise drawn), EPOCHS, PAUSE (seconds
after every epoch, so that there is time to watch), OUTPUT (the model's file).
"""

import hashlib
import os
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

EPOCHS = int(os.environ.get("EPOCHS", "40"))
PAUSE = float(os.environ.get("PAUSE", "1.0"))
OUTPUT = Path(os.environ.get("OUTPUT", "digits-model.bin"))
BATCH = 32


def main() -> None:
    seed = int(os.environ.get("SEED") or int.from_bytes(os.urandom(4), "little"))
    nonce = os.urandom(4).hex()  # of this process, and of no other
    print(f"nonce {nonce} seed {seed} pid {os.getpid()}", flush=True)

    images, labels = load_digits(return_X_y=True)
    images = images / 16.0
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(labels))
    train, test = order[:1400], order[1400:]
    model = MLPClassifier(
        (48,), solver="sgd", learning_rate_init=0.1, momentum=0.9, random_state=seed % 2**32
    )
    for epoch in range(1, EPOCHS + 1):
        draw.shuffle(train)
        for start in range(0, len(train), BATCH):
            batch = train[start : start + BATCH]
            model.partial_fit(images[batch], labels[batch], classes=range(10))
        accuracy = model.score(images[test], labels[test])
        print(
            f"nonce {nonce} epoch {epoch:2d}/{EPOCHS} loss {model.loss_:.6f} accuracy {accuracy:.4f}",
            flush=True,
        )
        time.sleep(PAUSE)

    data = b"".join(np.ascontiguousarray(part).tobytes() for part in (*model.coefs_, *model.intercepts_))
    OUTPUT.write_bytes(data)
    print(f"nonce {nonce} sha256 {hashlib.sha256(data).hexdigest()}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
