"""A share that refuses root, as an NFS export with root squashed does: FUSE, mounted for one user and without allow_root.

The daemon speaks the kernel's protocol itself (linux/fuse.h, 7.31): one folder with one file, which can be read and appended to.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
from pathlib import Path

USER = 1000
NAME = b"data"
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ROOT, _FILE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Share:
    """Mounted at ``target`` until ``close``."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.content = bytearray(b"first\n")
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40755,user_id={USER},group_id={USER},default_permissions"
        if _libc.mount(b"squashed", bytes(target), b"fuse", 0, options.encode()):
            number = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(number, os.strerror(number), str(target))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take it away, whoever still uses it."""
        _libc.umount2(bytes(self.target), 2)
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, 1 << 20)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # unmounted, or closed
            _, code, unique, node, *_ = _IN.unpack_from(request)
            answer = self._answer(code, node, request[_IN.size :])
            if answer is None:
                continue
            number, body = answer if isinstance(answer, tuple) else (0, answer)
            with contextlib.suppress(OSError):
                os.write(self._fd, _OUT.pack(_OUT.size + len(body), -number, unique) + body)

    def _answer(self, code: int, node: int, body: bytes) -> bytes | tuple[int, bytes] | None:
        match code:
            case 26:  # INIT: the version that is spoken here, and no flags
                return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 10, 1 << 17, 1, 0, 0, 0)
            case 1:  # LOOKUP
                if body.rstrip(b"\0") != NAME:
                    return errno.ENOENT, b""
                return struct.pack("<QQQQII", _FILE, 0, 1, 1, 0, 0) + self._attributes(_FILE)
            case 3 | 4:  # GETATTR, SETATTR
                return struct.pack("<QII", 1, 0, 0) + self._attributes(node)
            case 14 | 27:  # OPEN, OPENDIR
                return struct.pack("<QII", node, 1, 0)
            case 15:  # READ
                _, offset, size = struct.unpack_from("<QQI", body)
                return bytes(self.content[offset : offset + size])
            case 16:  # WRITE
                _, offset, size = struct.unpack_from("<QQI", body)
                data = body[40 : 40 + size]
                self.content[offset : offset + size] = data
                return struct.pack("<II", len(data), 0)
            case 28:  # READDIR
                offset = struct.unpack_from("<QQ", body)[1]
                if offset:
                    return b""
                entry = struct.pack("<QQII", _FILE, 1, len(NAME), stat.S_IFREG >> 12) + NAME
                return entry.ljust(-(-len(entry) // 8) * 8, b"\0")
            case 25 | 18 | 29 | 20 | 34:  # FLUSH, RELEASE, RELEASEDIR, FSYNC, ACCESS
                return b""
            case 2 | 36 | 42:  # FORGET, INTERRUPT, BATCH_FORGET
                return None
            case 17:  # STATFS
                return struct.pack("<QQQQQIIII24x", 1000, 500, 500, 100, 50, 4096, 255, 4096, 0)
            case _:
                return errno.ENOSYS, b""

    def _attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o644
        size = 0 if node == _ROOT else len(self.content)
        return _ATTR.pack(node, size, 1, 0, 0, 0, 0, 0, 0, mode, 1, USER, USER, 0, 4096, 0)
