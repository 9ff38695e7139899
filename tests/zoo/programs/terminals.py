"""A terminal of its own: python's pty with a shell that has job control, and script(1) around another program."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios

from common import run

pid, master = pty.fork()
if pid == 0:
    os.execvp("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"])
fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
attributes = termios.tcgetattr(master)
attributes[3] &= ~termios.ECHO
termios.tcsetattr(master, termios.TCSANOW, attributes)
typescript = subprocess.Popen(
    ["script", "-qfc", "while read -r x; do echo got $x; done", "/dev/null"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
)  # fmt: skip


def ask(write: int, read: int, text: str, answer: str) -> None:
    os.write(write, text.encode())
    seen = ""
    while answer not in seen:
        ready, _, _ = select.select([read], [], [], 10)
        assert ready, f"no {answer!r} in {seen!r}"
        seen += os.read(read, 4096).decode()


ask(master, master, "set -m; stty -echo; PS1='again> '; sleep 1000 & echo started-$((1+1))\n", "started-2")


def check(n: int) -> None:
    ask(
        master,
        master,
        f"echo $((n={n}))-$(stty size)-$(tty)-$(jobs -r | wc -l)-end\n",
        f"{n}-33 77-/dev/pts/{number}-1-end",
    )
    ask(master, master, f"bash -c 'echo child-$(({n}))-$((1+1)); sleep 1000'\n", f"child-{n}-2")
    # ^C goes to the foreground job and not to the shell, which forgets what it is told before it has seen that job end.
    ask(master, master, "\x03", "again> ")
    ask(typescript.stdin.fileno(), typescript.stdout.fileno(), f"line{n}\n", f"got line{n}")
    assert termios.tcgetattr(slave) == before, "the terminal's settings have changed"


number = struct.unpack("i", fcntl.ioctl(master, 0x80045430, bytes(4)))[0]  # TIOCGPTN
slave = os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY)
before = termios.tcgetattr(slave)
run(check)
os.kill(pid, 9)
typescript.kill()
