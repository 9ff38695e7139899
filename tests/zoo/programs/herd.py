"""Runs several programs at once, each line of theirs marked with their name; fails when one of them fails.

Arguments: pairs of a name and a command as a JSON array.
"""

import json
import os
import subprocess
import sys
import threading

words = sys.argv[1:]
statuses = {}


def follow(name: str, command: list[str]) -> None:
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            os.write(1, f"{name}: ".encode() + line)
    statuses[name] = process.returncode
    os.write(1, f"{name}: exit {process.returncode}\n".encode())


threads = [
    threading.Thread(target=follow, args=(n, json.loads(c)))
    for n, c in zip(words[::2], words[1::2], strict=True)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(any(statuses.values()))
