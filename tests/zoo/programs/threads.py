"""Threads with locks, conditions, queues, thread-local storage and one that waits on a futex all the time."""

import queue
import threading
import time

from common import run, within

COUNT = 8
local = threading.local()
work: queue.Queue = queue.Queue(maxsize=20)
done: queue.Queue = queue.Queue()
gate = threading.Condition()
turn = 0
idents: dict[int, int] = {}


def serve(number: int) -> None:
    local.number = number
    idents[number] = threading.get_native_id()
    while True:
        done.put((number, local.number, threading.get_native_id(), work.get() ** 2))


def take_turns(number: int) -> None:
    global turn
    while True:
        with gate:
            gate.wait_for(lambda: turn % 3 == number)
            turn += 1
            gate.notify_all()
        time.sleep(0.001)


for i in range(COUNT):
    threading.Thread(target=serve, args=(i,), daemon=True).start()
for i in range(3):
    threading.Thread(target=take_turns, args=(i,), daemon=True).start()
threading.Thread(target=threading.Lock().acquire, daemon=True).start()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire, daemon=True).start()


def check(n: int) -> None:
    before = turn
    for x in range(50):
        work.put(n + x)
    results = [done.get(timeout=10) for _ in range(50)]
    assert sorted(r[3] for r in results) == [(n + x) ** 2 for x in range(50)], "a queue lost or changed work"
    assert all(r[0] == r[1] and r[2] == idents[r[0]] for r in results), "a thread is not who it was"
    within(10, lambda: turn > before, "a turn of the threads that take turns")
    assert lock.locked(), "a held lock is free"


run(check)
