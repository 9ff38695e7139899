"""A process in a root directory of its own (chroot), with a file, a working directory and a program there."""

import os
import shutil
import subprocess

from common import run

os.makedirs("/srv/zoo/root/bin", exist_ok=True)
os.makedirs("/srv/zoo/root/home", exist_ok=True)
subprocess.run(["cp", "-L", shutil.which("busybox") or "/bin/true", "/srv/zoo/root/bin/tool"], check=True)
ask_read, ask_write = os.pipe()
answer_read, answer_write = os.pipe()
child = os.fork()
if child == 0:
    os.chroot("/srv/zoo/root")
    os.chdir("/home")
    file = open("/home/file", "w+")
    while os.read(ask_read, 1):
        file.write("x")
        file.flush()
        os.write(
            answer_write,
            f"{os.getcwd()} {sorted(os.listdir('/'))} {os.path.getsize('file')} {os.path.exists('/etc')}".encode(),
        )
    os._exit(0)


def check(n: int) -> None:
    os.write(ask_write, b"?")
    assert os.read(answer_read, 200).decode() == f"/home ['bin', 'home'] {n} False"
    assert os.path.getsize("/srv/zoo/root/home/file") == n


run(check)
os.kill(child, 9)
