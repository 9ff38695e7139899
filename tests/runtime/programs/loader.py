"""PyTorch with a DataLoader of two worker processes. usage: loader.py COUNTER FOLDER SEED STEPS"""

import hashlib
import sys
import time
from pathlib import Path

import torch
from posting import Posting  # type: ignore[import-not-found] # beside this file, which is run by its path
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    """Items that depend on their index alone, big enough to travel in shared memory."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2048, generator=generator)


def main() -> None:
    address, folder, seed, steps = sys.argv[1:]
    posting = Posting(address)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    model = torch.nn.Linear(2048, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Noise(), batch_size=8, shuffle=True, num_workers=2, prefetch_factor=4))
    with (out / "batches.csv").open("w", buffering=1) as batches:
        for step in range(int(steps)):
            batch = next(loader)
            loss = ((model(batch) - batch[:, :1]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            digest = hashlib.sha256(batch.numpy().tobytes()).hexdigest()
            batches.write(f"{step},{digest},{loss.item():.17g}\n")
            print(step, flush=True)
            posting.step(step)
            time.sleep(0.02)
    (out / "weights.bin").write_bytes(model.weight.detach().numpy().tobytes())
    for name in ("batches.csv", "weights.bin"):
        posting.file(out / name)


if __name__ == "__main__":
    main()
