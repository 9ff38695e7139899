"""A sqlite database in WAL mode, written by one process and read by another, with a transaction open at the move."""

import os
import sqlite3

from common import run

os.makedirs("/srv/zoo", exist_ok=True)
path = f"/srv/zoo/base-{os.getpid()}.sqlite"
writer = sqlite3.connect(path, isolation_level=None, timeout=20)
writer.execute("pragma journal_mode=wal")
writer.execute("create table t(n integer primary key, data blob)")
writer.execute("create table open_at_the_move(n integer)")
ask_read, ask_write = os.pipe()
answer_read, answer_write = os.pipe()
child = os.fork()
if child == 0:
    reader = sqlite3.connect(path, timeout=20)
    while os.read(ask_read, 1):
        found = reader.execute("select count(*), coalesce(sum(length(data)), 0) from t").fetchone()
        reader.rollback()
        os.write(answer_write, repr(found).encode())
    os._exit(0)
writer.execute("begin immediate")


def check(n: int) -> None:
    writer.execute("insert into open_at_the_move values (?)", (n,))
    writer.execute("insert into t values (?, ?)", (n, os.urandom(1000)))
    writer.execute("commit")
    os.write(ask_write, b"?")
    assert os.read(answer_read, 100).decode() == repr((n, n * 1000)), "the reader sees something else"
    writer.execute("begin immediate")  # held over the pause, in which most moves fall
    if n % 20 == 0:
        writer.execute("commit")
        assert writer.execute("pragma integrity_check").fetchone() == ("ok",)
        writer.execute("begin immediate")


run(check)
writer.execute("commit")
assert writer.execute("pragma integrity_check").fetchone() == ("ok",)
os.kill(child, 9)
