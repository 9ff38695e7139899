"""PyTorch's DataLoader with two worker processes: every batch is the right one."""

import time

import torch
from common import run
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
epoch = 0


class Rows(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4096,), epoch * 1000 + i, dtype=torch.int64)


def check(n: int) -> None:
    global epoch
    epoch = n  # forked anew in every epoch: workers see the epoch of their fork
    for at, batch in enumerate(DataLoader(Rows(), batch_size=8, num_workers=2, prefetch_factor=2)):
        wanted = torch.arange(at * 8, at * 8 + 8).unsqueeze(1).expand(8, 4096) + epoch * 1000
        assert torch.equal(batch, wanted), f"epoch {epoch} batch {at}: {batch[:, 0].tolist()}"
        time.sleep(0.01)


run(check, 0.0)
