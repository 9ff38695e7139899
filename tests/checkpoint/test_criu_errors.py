"""Each row of the table of CRIU's and runc's messages, with a line from a real log (4.2.1) where one could be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from savedworker.checkpoint.criu_errors import TABLE, error_lines, explain
from savedworker.model.errors import Fatal, Refused, Temporary

ROWS = [
    ("(00.1) Error (criu/sk-queue.c:1): unix: Non-empty write queue on an in-flight socket", Temporary, "waits to be accepted"),
    ("(00.1) Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory", Fatal, "no /dev/net/tun"),
    ('(00.1) Error (criu/util.c:642): execvp("tar", ...) failed: No such file or directory', Fatal, "cannot run tar and gzip"),
    ("(00.1) Error (criu/x.c:1): tar (child): Error is not recoverable: exiting now", Fatal, "cannot run tar and gzip"),
    ("(00.1) Error (criu/image.c:601): Unable to write img: No space left on device", Fatal, "the disk for checkpoint images is full"),
    ("(00.1) Error (criu/files-reg.c:1031): Can't dump ghost file /tmp/h of 2148536320 size, increase limit", Refused, "the deleted file /tmp/h, which is still open, is larger than the limit (2148536320 bytes)"),
    ("(00.1) Error (criu/files-reg.c:1790): Can't lookup mount=108 for fd=3 path=/q", Refused, "/q is open or mapped and lies on a file system that the worker cannot see"),
    ("(00.1) pie: 6: Error (criu/pie/parasite.c:588): send_fds failed (-22)", Refused, "as that of an io_uring"),
    ("(00.1) Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon anon_inode:[userfaultfd])", Refused, "a kernel object open that CRIU cannot save (userfaultfd)"),
    ("(00.1) Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon anon_inode:bpf-map)", Refused, "cannot save (bpf-map)"),
    ("(00.1) Error (criu/files-ext.c:94): Can't dump file 3 of that type [20660] (chr 10:237)", Refused, "a device open that CRIU cannot save (chr 10:237)"),
    ("(00.1) Error (criu/fsnotify.c:284): fsnotify: \tCan't dump that handle", Refused, "watches a file of its writable layer (inotify)"),
    ("(00.1) Error (criu/sk-unix.c:2285): unix: FATAL: Peer 403064 unresolved for 403618", Refused, "connected to a process outside the worker"),
    ("(00.1) Error (criu/sk-unix.c:833): unix: External socket is used. Consider using --ext-unix-sk option.", Refused, "connected to a process outside the worker"),
    ("(00.1) Error (criu/sockets.c:767): sockets: BUG! Unknown socket collected (family 40)", Refused, "a socket of a kind that CRIU cannot save (40)"),
    ("(00.1) Error (criu/sk-inet.c:137): inet: Unsupported proto 262 for socket 684a7", Refused, "cannot save (262)"),
    ("(00.1) Error (criu/sk-inet.c:504): inet: Can't dump corked dgram socket 67fb5", Temporary, "in the middle of composing a datagram"),
    ("(00.1) Error (criu/sk-unix.c:506): unix: Non-empty write queue on an in-flight socket 0x20a12b", Temporary, "waits to be accepted, with data in it"),
    ("(00.1) Error (criu/namespaces.c:460): Can't dump nested user namespace for 29863", Refused, "a user namespace of its own"),
    ("(00.1) Error (criu/kcmp-ids.c:90): Can't make VM id for 25061", Refused, "shares its memory with another one"),
    ("(00.1) Error (criu/parasite-syscall.c:600): Can't dump task 12 running in 32-bit mode", Refused, "a 32-bit program"),
    ("(00.1) Error (criu/seize.c:335): zombie 29162 (comm python3) found while seizing", Temporary, "being traced, or was ending"),
    ("(00.1) Error (criu/cr-dump.c:1900): Timeout reached. Try to interrupt: 0", Temporary, "could not be stopped in time"),
    ("(00.1) Error (criu/seize.c:630): Unable to freeze cgroup /sys/fs/cgroup/freezer/x (50 x 100ms attempts, timeout: 10s)", Temporary, "could not be stopped in time"),
    ("(00.1) Error (criu/cr-dump.c:300): Can't get rlimit 0: Operation not permitted", Fatal, "of another user than root"),
    ("(00.1) Error (criu/cpu.c:500): cpu: CPU capabilities do not match run time", Refused, "this instance's CPU lacks features"),
    ("(00.1) Error (criu/cpu.c:510): cpu: CPU instruction capabilities do not match run time", Refused, "this instance's CPU lacks features"),
    ("(00.1)      8: Error (criu/files-reg.c:2175): File data/with space has bad size 8 (expect 4)", Refused, "/data/with space is another file here"),
    ("(00.1)      8: Error (criu/files-reg.c:2119): File usr/lib/libc.so.6 has bad build-ID", Refused, "/usr/lib/libc.so.6 is another file here"),
    ("(00.1)      8: Error (criu/files-reg.c:2250): Can't open file data/part on restore: No such file or directory", Refused, "the file /data/part that the worker has open is missing here"),
    ("(00.1)      8: Error (criu/sk-inet.c:1200): inet: Can't bind inet socket (id 5): Address already in use", Refused, "an address that the worker listens on"),
    ("(00.1)      8: Error (criu/sk-inet.c:1200): inet: Can't bind inet socket (id 5): Cannot assign requested address", Refused, "an address that the worker listens on"),
    ("(00.1)      8: Error (criu/cr-restore.c:1400): Can't fork for 8: File exists", Refused, "the pid 8 of the worker is taken"),
    ("(00.1) Error (criu/config.c:100): Unknown option [no-such-thing]", Fatal, "CRIU does not know an option of ours"),
    ("(00.1) Error (libcontainer): read unixpacket @->@: EOF", Temporary, "CRIU ended in the middle of its work"),
    ("(00.1) pie: 8: Error (criu/pie/restorer.c:200): Can't setgroups([3 gids]): -1", Fatal, "user identities cannot be restored"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "message"), ROWS)
def test_a_line_of_a_log_is_explained_in_one_line_with_a_fix(
    tmp_path: Path, line: str, kind: type[Exception], message: str
) -> None:
    log = tmp_path / "dump.log"
    log.write_text(
        f"(00.000001) Warn: nothing\n{line}\n(00.2) Error (criu/cr-dump.c:1975): Dumping FAILED.\n"
    )
    found = explain(log, "criu failed: type DUMP errno 0")
    assert type(found) is kind
    assert message in found.message
    assert found.fix
    assert "\n" not in str(found)


def test_every_row_of_the_table_has_its_line_here() -> None:
    used = {next(row.pattern.pattern for row in TABLE if row.pattern.search(line)) for line, _, _ in ROWS}
    assert used == {row.pattern.pattern for row in TABLE}


def test_what_runc_says_is_explained_when_there_is_no_log(tmp_path: Path) -> None:
    found = explain(tmp_path / "missing", "criu failed: type DUMP errno 56")
    assert found.message.startswith("CRIU does not know an option of ours")


def test_an_unknown_error_is_told_in_crius_words_with_the_place_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    log.write_text("(00.1)   123: Error (criu/new.c:1): Something never seen\n")
    found = explain(log, "")
    assert found.message == "CRIU failed: Error (criu/new.c:1): Something never seen"
    assert str(log) in found.fix
    assert explain(tmp_path / "missing", "").message == "CRIU failed: no reason given"


def test_harmless_lines_are_left_out_and_of_a_huge_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    with log.open("w") as file:
        file.write("(00.1) Error (criu/first.c:1): too far back\n")
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(
            "\n(00.1) Error (criu/util.c:9): Can't setup RLIMIT_NOFILE\n(00.2) Error (criu/last.c:1): the end\n"
        )
    assert error_lines(log) == ["Error (criu/last.c:1): the end"]
