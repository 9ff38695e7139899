"""System V shared memory, semaphores and message queues: ids, keys, contents and waiting processes."""

import ctypes
import os
import struct

from common import called, libc, run, say

IPC_PRIVATE, IPC_CREAT, IPC_RMID, SETVAL, GETVAL, SEM_UNDO, IPC_NOWAIT = 0, 0o1000, 0, 16, 12, 0x1000, 0o4000
libc.shmat.restype = ctypes.c_void_p
memory = called(libc.shmget(0x5A5A, 1 << 20, IPC_CREAT | 0o600), "shmget")
address = libc.shmat(memory, None, 0)
semaphores = called(libc.semget(0x5A5B, 2, IPC_CREAT | 0o600), "semget")
called(libc.semctl(semaphores, 0, SETVAL, 7), "semctl")
called(libc.semctl(semaphores, 1, SETVAL, 0), "semctl")
messages = called(libc.msgget(0x5A5C, IPC_CREAT | 0o600), "msgget")
held, waiting = os.pipe()


def operate(number: int, by: int, flags: int = 0) -> None:
    called(libc.semop(semaphores, struct.pack("Hhh", number, by, flags), 1), "semop")


child = os.fork()
if child == 0:
    libc.semop(semaphores, struct.pack("Hhh", 0, -2, SEM_UNDO), 1)
    os.write(waiting, b"x")
    while libc.semop(semaphores, struct.pack("Hhh", 1, -1, 0), 1) < 0:
        pass  # EINTR
    os._exit(0)
os.read(held, 1)


def send(n: int) -> None:
    called(libc.msgsnd(messages, struct.pack("q20s", 5, b"message %d" % n), 20, 0), "msgsnd")


ctypes.memset(address, 0, 1 << 20)
send(0)


def check(n: int) -> None:
    assert ctypes.string_at(address, 8) == (n - 1).to_bytes(8, "little"), "shared memory"
    ctypes.memmove(address, n.to_bytes(8, "little"), 8)
    again = libc.shmat(called(libc.shmget(0x5A5A, 1 << 20, 0o600), "shmget by key"), None, 0)
    assert ctypes.string_at(again, 8) == n.to_bytes(8, "little"), "shared memory by its key"
    libc.shmdt(ctypes.c_void_p(again))
    assert libc.semctl(semaphores, 0, GETVAL) == 5, "a semaphore's value"
    buffer = ctypes.create_string_buffer(28)
    called(libc.msgrcv(messages, buffer, 20, 5, IPC_NOWAIT), "msgrcv")
    assert buffer.raw[8:].rstrip(b"\0") == b"message %d" % (n - 1), buffer.raw
    send(n)
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "a process that waits for a semaphore got it"


run(check)
operate(1, 1)
assert os.waitpid(child, 0) == (child, 0)
if libc.semctl(semaphores, 0, GETVAL) != 7:
    say("forgotten: SEM_UNDO")
