"""multiprocessing by spawn: a pool, shared memory, a named semaphore's lock, a queue, an event and a manager."""

import multiprocessing
from multiprocessing import shared_memory

from common import run


def square(x: int) -> int:
    return x * x


def add(name: str, lock, queue, event) -> None:
    block = shared_memory.SharedMemory(name)
    while not event.is_set():
        count = queue.get()
        for _ in range(count):
            with lock:
                value = int.from_bytes(block.buf[:8], "little") + 1
                block.buf[:8] = value.to_bytes(8, "little")
        queue.task_done()
    block.close()


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    block.buf[:] = b"\0" * len(block.buf)
    pattern = bytes(range(256)) * 4000
    block.buf[8 : 8 + len(pattern)] = pattern
    lock, queue, event = spawn.Lock(), spawn.JoinableQueue(), spawn.Event()
    adders = [spawn.Process(target=add, args=(block.name, lock, queue, event)) for _ in range(2)]
    for adder in adders:
        adder.start()
    with spawn.Pool(2) as pool, spawn.Manager() as manager:
        shared = manager.dict()
        expected = 0

        def check(n: int) -> None:
            global expected
            assert pool.map(square, range(n, n + 20)) == [x * x for x in range(n, n + 20)], "the pool"
            for _ in range(4):
                queue.put(25)
            queue.join()
            expected += 100
            found = int.from_bytes(block.buf[:8], "little")
            assert found == expected, f"the shared counter is {found}, not {expected}"
            assert bytes(block.buf[8 : 8 + len(pattern)]) == pattern, "shared memory has changed"
            shared[n] = n
            assert len(shared) == n, "the manager"

        run(check)
        event.set()
        for _ in adders:
            queue.put(0)
        for adder in adders:
            adder.join()
    block.close()
    block.unlink()
