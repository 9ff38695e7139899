"""asyncio, with its own loop or uvloop: tasks, timers, a TCP and a unix server with clients, a child and a signal handler."""

import asyncio
import os
import signal
import sys

from common import say, told_to_end


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()


async def main() -> None:
    os.makedirs("/srv/zoo", exist_ok=True)
    path = f"/srv/zoo/{os.getpid()}.socket"
    tcp = await asyncio.start_server(answer, "127.0.0.1", 0)
    await asyncio.start_unix_server(answer, path)
    streams = [
        await asyncio.open_connection(*tcp.sockets[0].getsockname()),
        await asyncio.open_unix_connection(path),
    ]
    cat = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    ticks = caught = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    def catch() -> None:
        nonlocal caught
        caught += 1

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, catch)
    ticker = asyncio.create_task(tick())
    say("ready")
    n = 0
    while not told_to_end():
        n += 1
        before = ticks
        for reader, writer in streams:
            writer.write(b"hello %d\n" % n)
            assert await asyncio.wait_for(reader.readline(), 10) == b"HELLO %d\n" % n
        cat.stdin.write(b"cat %d\n" % n)
        assert await asyncio.wait_for(cat.stdout.readline(), 10) == b"cat %d\n" % n
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.1)
        for _ in range(100):
            if caught == n and ticks > before:
                break
            await asyncio.sleep(0.1)
        assert caught == n, f"{caught} of {n} signals"
        assert ticks > before, "timers stand still"
        assert not ticker.done(), "a task has ended"
        thread = await asyncio.to_thread(sum, range(1000))
        assert thread == 499500
        say("ok", n)
    cat.stdin.close()
    assert await cat.wait() == 0
    say("done")
    os._exit(0)


if sys.argv[1:] == ["uvloop"]:
    import uvloop

    uvloop.run(main())
else:
    asyncio.run(main())
