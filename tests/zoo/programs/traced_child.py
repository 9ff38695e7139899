"""A debugger: a child that is being traced."""

import os
import time

from common import called, libc, run

child = os.fork()
if child == 0:
    while True:
        time.sleep(0.1)
PTRACE_SEIZE = 0x4206
called(libc.ptrace(PTRACE_SEIZE, child, None, None), "ptrace")
run(lambda n: None)
os.kill(child, 9)
