"""An eventfd that counts as a semaphore (EFD_SEMAPHORE)."""

import os

from common import run

semaphore = os.eventfd(1_000_000, os.EFD_SEMAPHORE)


def check(n: int) -> None:
    assert os.eventfd_read(semaphore) == 1


run(check)
