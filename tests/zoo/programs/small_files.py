"""50,000 small files in the layer: all of them are there, with their content, mode and time, while more are written."""

import os

from common import run

os.umask(0)
FOLDERS, EACH = 100, 500
for folder in range(FOLDERS):
    os.makedirs(f"/srv/zoo/many/{folder}")
    for i in range(EACH):
        fd = os.open(f"/srv/zoo/many/{folder}/{i}", os.O_WRONLY | os.O_CREAT, 0o600 + i % 8)
        os.write(fd, b"%d %d" % (folder, i))
        os.close(fd)
    os.utime(f"/srv/zoo/many/{folder}/0", (1000, 2000))


def check(n: int) -> None:
    folder = n % FOLDERS
    names = os.listdir(f"/srv/zoo/many/{folder}")
    assert len(names) == EACH + (n - 1) // FOLDERS, f"{len(names)} files in {folder}"
    for i in range(EACH):
        path = f"/srv/zoo/many/{folder}/{i}"
        with open(path, "rb") as file:
            assert file.read() == b"%d %d" % (folder, i), path
        if i % 50 == 0:
            assert os.stat(path).st_mode & 0o777 == 0o600 + i % 8, path
    assert os.stat(f"/srv/zoo/many/{folder}/0").st_mtime == 2000
    open(f"/srv/zoo/many/{folder}/more-{n}", "w").close()


run(check, 0.02)
