"""The layer's index: one document that names every file of a captured directory tree and the chunks that hold its data.

Plain dataclasses with slots and one validating pass instead of pydantic: a layer of 50,000 small files is ordinary.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from savedworker.model.errors import Refused

FORMAT = "savedworker-layer"
FORMAT_VERSION = 3
"""1 had a chunk for every extent, 2 no file whose data is a space; both are read as well."""

CHUNK_SIZE = 4 << 20
"""Bytes. File data is cut at multiples of this offset; no chunk is longer."""

ROOT = "."
"""The path of the captured directory itself, always the first entry."""

SPACE_PATH_MAX = 1024
"""Bytes of the path of a file whose data is a space: it is opened by that path."""

MAX_DEPTH = 2048
"""Levels below the root. Deeper trees are refused: opening them without following symlinks costs the square of the depth."""

KEPT_DEVICES = frozenset({(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0)})
"""null, zero, full, random, urandom, tty (Linux' devices.txt). An index must not be a way to a host's disk or memory."""

XATTR_NAMESPACES = ("user.", "trusted.", "security.", "system.posix_acl_")

_KEY = re.compile(r"[0-9a-f]{64}")
_SPACE = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MAX_ID = 2**32 - 2  # (uid_t) -1 means "do not change" to chown(2)
_MAX_OFFSET = 2**63 - 1
_NAME_MAX = 255
_PATH_MAX = 4096
_XATTR_NAME_MAX = 255
_XATTR_SIZE_MAX = 65536


class Extent(NamedTuple):
    """A piece of a file: ``length`` bytes at ``offset`` of it, which begin at byte ``at`` of chunk ``key``, one of ``of`` bytes."""

    offset: int
    length: int
    key: str
    at: int
    of: int

    @classmethod
    def whole(cls, offset: int, length: int, key: str) -> Extent:
        """One that has its chunk for itself."""
        return cls(offset, length, key, 0, length)

    @property
    def packed(self) -> bool:
        """Whether there is something else in its chunk."""
        return self.length != self.of


@dataclass(slots=True)
class Entry:
    """One name in the tree. Paths are relative; bytes that are not UTF-8 are kept by ``surrogateescape``.

    ``kind`` is ``dir file symlink fifo device whiteout socket-skipped``. A whiteout is overlayfs' mark for a deleted lower
    file (a character device 0:0). Bound sockets are listed and not extracted: CRIU binds them again. ``link`` makes this
    another name of the file at that path, and then nothing else of the entry counts.
    """

    path: str
    kind: str
    mode: int = 0
    """Permission bits with setuid, setgid and sticky."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    """Bytes, holes included (files only)."""
    data: tuple[Extent, ...] = ()
    """Everything of a file that is not a hole, in ascending order."""
    space: str | None = None
    """The name under which the data is stored elsewhere, of a file that has none here."""
    runs: tuple[tuple[int, int], ...] = ()
    """What of such a file is data: offset and length in bytes, in ascending order."""
    link: str | None = None
    target: str | None = None
    """Where a symlink points to."""
    major: int = 0
    minor: int = 0


@dataclass(slots=True)
class LayerIndex:
    """A whole tree, parents before their children."""

    entries: list[Entry]

    def chunk_keys(self) -> Iterator[str]:
        """Keys of the chunks; a key can come more than once."""
        for entry in self.entries:
            for extent in entry.data:
                yield extent.key

    def to_bytes(self) -> bytes:
        """The document as compact JSON."""
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "entries": [_to_json(e) for e in self.entries],
        }
        return json.dumps(document, separators=(",", ":")).encode("ascii")

    @classmethod
    def parse(cls, document: bytes) -> LayerIndex:
        """Read and check a document that may come from anywhere.

        Raises Refused for malformed JSON, an unknown format version, and everything that ``check`` refuses.
        """
        try:
            raw = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise _refused(f"not JSON ({type(error).__name__})") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise _refused(f"its format is not {FORMAT!r}")
        version = raw.get("version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise Refused(
                f"layer index of format version {version!r} is unknown; this program reads versions 1 to {FORMAT_VERSION}",
                "restore with the version of Saved Worker that wrote it, or a later one",
            )
        entries = raw.get("entries")
        if set(raw) != {"format", "version", "entries"} or not isinstance(entries, list):
            raise _refused("wrong fields at the top")
        index = cls([_from_json(e) for e in entries])
        check(index)
        return index


# kind -> (fields that must be there, fields that may be there), besides path and kind
_COMMON = frozenset({"mode", "uid", "gid", "mtime_ns"})
_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "dir": (_COMMON, frozenset({"xattrs"})),
    "file": (_COMMON | {"size"}, frozenset({"xattrs", "data", "space", "runs"})),
    "symlink": (_COMMON | {"target"}, frozenset({"xattrs"})),
    "fifo": (_COMMON, frozenset({"xattrs"})),
    "device": (_COMMON | {"major", "minor"}, frozenset({"xattrs"})),
    "whiteout": (_COMMON, frozenset({"xattrs"})),
    "socket-skipped": (_COMMON, frozenset({"xattrs"})),
}
_NUMBERS = frozenset({"mode", "uid", "gid", "mtime_ns", "size", "major", "minor"})
_LINK = frozenset({"path", "kind", "link"})
_BASE = frozenset({"path", "kind"})
_WHERE = (frozenset({"data"}), frozenset({"space", "runs"}))
"""What says where the data of a file is."""


def _refused(reason: str, path: object = None) -> Refused:
    where = f" at {path!r:.300}" if path is not None else ""
    return Refused(
        f"layer index refused{where}: {reason}", "the checkpoint is damaged or foreign; use an earlier one"
    )


def _to_json(entry: Entry) -> dict[str, Any]:
    if entry.link is not None:
        return {"path": entry.path, "kind": entry.kind, "link": entry.link}
    out: dict[str, Any] = {
        "path": entry.path,
        "kind": entry.kind,
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "mtime_ns": entry.mtime_ns,
    }
    if entry.xattrs:
        out["xattrs"] = {name: b64encode(value).decode("ascii") for name, value in entry.xattrs.items()}
    if entry.kind == "file":
        out["size"] = entry.size
        if entry.space is None:
            out["data"] = [extent if extent.packed else extent[:3] for extent in entry.data]
        else:
            out["space"], out["runs"] = entry.space, entry.runs
    elif entry.kind == "symlink":
        out["target"] = entry.target
    elif entry.kind == "device":
        out["major"] = entry.major
        out["minor"] = entry.minor
    return out


def _from_json(raw: Any) -> Entry:
    if not isinstance(raw, dict):
        raise _refused("an entry is not an object")
    path, kind = raw.get("path"), raw.get("kind")
    if not isinstance(path, str) or not isinstance(kind, str):
        raise _refused("an entry without path or kind")
    names = raw.keys()
    if "link" in raw:
        if names != _LINK or not isinstance(raw["link"], str):
            raise _refused("a malformed hard link", path)
        return Entry(path, kind, link=raw["link"])
    if kind not in _FIELDS:
        raise _refused(f"unknown kind {kind!r}", path)
    required, optional = _FIELDS[kind]
    if not required <= names or not names <= required | optional | _BASE:
        raise _refused("missing or unknown fields", path)
    for name in _NUMBERS & names:
        if type(raw[name]) is not int:  # and not isinstance: True is no size
            raise _refused(f"{name} is not a whole number", path)
    entry = Entry(path, kind, raw["mode"], raw["uid"], raw["gid"], raw["mtime_ns"])
    if "xattrs" in raw:
        entry.xattrs = _xattrs_from_json(raw["xattrs"], path)
    if kind == "file":
        entry.size = raw["size"]
        if names & {"data", "space", "runs"} not in _WHERE:
            raise _refused("a file whose data is nowhere, or in two places", path)
        if "data" in raw:
            entry.data = _data_from_json(raw["data"], path)
        else:
            entry.space, entry.runs = raw["space"], _runs_from_json(raw["runs"], path)
            if not isinstance(entry.space, str):
                raise _refused("the name of its data is not a string", path)
    elif kind == "symlink":
        if not isinstance(raw["target"], str):
            raise _refused("a symlink's target is not a string", path)
        entry.target = raw["target"]
    elif kind == "device":
        entry.major, entry.minor = raw["major"], raw["minor"]
    return entry


def _data_from_json(raw: Any, path: str) -> tuple[Extent, ...]:
    if not isinstance(raw, list):
        raise _refused("data is not a list", path)
    for extent in raw:
        if not isinstance(extent, list) or len(extent) not in (3, 5) or not isinstance(extent[2], str):
            raise _refused(
                "data is not a list of (offset, length, key) or (offset, length, key, at, of)", path
            )
        if any(type(number) is not int for number in (*extent[:2], *extent[3:])):
            raise _refused("an extent is not made of whole numbers", path)
    return tuple([Extent(*x) if len(x) == 5 else Extent.whole(*x) for x in raw])


def _runs_from_json(raw: Any, path: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(raw, list):
        raise _refused("runs are not a list", path)
    for run in raw:
        if not isinstance(run, list) or len(run) != 2 or any(type(number) is not int for number in run):
            raise _refused("a run is not (offset, length)", path)
    return tuple([(offset, length) for offset, length in raw])


def _xattrs_from_json(raw: Any, path: str) -> dict[str, bytes]:
    if not isinstance(raw, dict):
        raise _refused("xattrs is not an object", path)
    out: dict[str, bytes] = {}
    for name, value in raw.items():
        try:
            out[name] = b64decode(value, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise _refused(f"extended attribute {name!r} is not base64", path) from error
    return out


def check(index: LayerIndex) -> None:
    """Refuse an index of well-typed entries that cannot be a captured tree.

    What holds afterwards: the first entry is the root directory; every other path is ``parent/name`` with ``parent`` a
    directory that came before, so there is no absolute path, no ``..``, no duplicate and no way through a symlink; hard
    links name an earlier regular file; data lies inside the file in order, without overlap, in pieces that no chunk
    exceeds; a file with a piece in a shared chunk has all of its data there; each chunk has one size; each space is of one file;
    devices are whiteouts or on the allow-list; numbers fit the kernel's types. Raises Refused.
    """
    first = index.entries[0] if index.entries else Entry("", "")
    if first.path != ROOT or first.kind != "dir" or first.link is not None:
        raise _refused("the first entry is not the root directory")
    directories = {ROOT: 0}
    files: set[str] = set()
    seen = {ROOT}
    sizes: dict[str, int] = {}
    spaces: set[str] = set()
    _check_metadata(first)
    for entry in index.entries[1:]:
        path = entry.path
        parent, slash, name = path.rpartition("/")
        depth = directories.get(parent if slash else ROOT)
        if depth is None or (slash and parent == ROOT):
            raise _refused("its parent is not a directory of this index", path)
        _check_name(name, path)
        if path in seen:
            raise _refused("listed twice", path)
        seen.add(path)
        if entry.link is not None:
            if entry.kind != "file" or entry.link not in files:
                raise _refused("a hard link to something that is not an earlier regular file", path)
            continue
        _check_metadata(entry)
        kind = entry.kind
        if kind == "dir":
            if depth + 1 > MAX_DEPTH:
                raise _refused(f"more than {MAX_DEPTH} levels deep", path)
            directories[path] = depth + 1
        elif kind == "file":
            _check_data(entry, sizes)
            if entry.space is not None:
                _check_space(entry, entry.space)
                if entry.space in spaces:
                    raise _refused("its data is that of another file as well", path)
                spaces.add(entry.space)
            files.add(path)
        elif kind == "symlink":
            target = entry.target or ""
            if not 0 < len(_encoded(target, path)) < _PATH_MAX or "\0" in target:
                raise _refused("a symlink without a possible target", path)
        elif kind == "device":
            if (entry.major, entry.minor) not in KEPT_DEVICES:
                raise _refused(
                    f"device {entry.major}:{entry.minor} is not on the list of harmless ones", path
                )
        elif kind not in ("fifo", "whiteout", "socket-skipped"):
            raise _refused(f"unknown kind {kind!r}", path)


def _encoded(text: str, path: str) -> bytes:
    """The bytes of a name; refuses the second spelling that surrogate escapes would give the same bytes."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _refused("characters that no file name can have", path) from error
    if raw.decode("utf-8", "surrogateescape") != text:
        raise _refused("a name spelled in another than the canonical way", path)
    return raw


def _check_name(name: str, path: str) -> None:
    if not name or name in (".", "..") or "\0" in name:
        raise _refused("an empty or forbidden component", path)
    if len(name) > _NAME_MAX or (not name.isascii() and len(_encoded(name, path)) > _NAME_MAX):
        raise _refused("a name longer than a file system takes", path)


def _check_metadata(entry: Entry) -> None:
    mode, uid, gid, mtime_ns = entry.mode, entry.uid, entry.gid, entry.mtime_ns
    if not 0 <= mode <= 0o7777:
        raise _refused("impossible mode", entry.path)
    if not 0 <= uid <= _MAX_ID or not 0 <= gid <= _MAX_ID:
        raise _refused("impossible owner", entry.path)
    if not -_MAX_OFFSET <= mtime_ns <= _MAX_OFFSET:
        raise _refused("impossible time", entry.path)
    for name, value in entry.xattrs.items():
        if not name.startswith(XATTR_NAMESPACES) or "\0" in name:
            raise _refused(f"extended attribute {name!r} of an unknown namespace", entry.path)
        if len(_encoded(name, entry.path)) > _XATTR_NAME_MAX or len(value) > _XATTR_SIZE_MAX:
            raise _refused(f"extended attribute {name!r} is larger than the kernel takes", entry.path)


def _check_data(entry: Entry, sizes: dict[str, int]) -> None:
    size = entry.size
    if not 0 <= size <= _MAX_OFFSET:
        raise _refused("impossible size", entry.path)
    end = 0
    if len({x.key if x.packed else "" for x in entry.data}) > 1:
        raise _refused("its data is in a shared chunk and in another one", entry.path)
    for offset, length, key, at, of in entry.data:
        if offset < end or length <= 0 or offset + length > size:
            raise _refused("extents overlap, are out of order or outside of the file", entry.path)
        end = offset + length
        if offset // CHUNK_SIZE != (end - 1) // CHUNK_SIZE:
            raise _refused("an extent crosses a chunk boundary", entry.path)
        if at < 0 or at + length > of or of > CHUNK_SIZE or sizes.setdefault(key, of) != of:
            raise _refused("an extent is outside of its chunk", entry.path)
        if not _KEY.fullmatch(key):
            raise _refused("a chunk key is not 64 hexadecimal digits", entry.path)


def _check_space(entry: Entry, name: str) -> None:
    if entry.data or not _SPACE.fullmatch(name):
        raise _refused("the name of its data is impossible", entry.path)
    if len(_encoded(entry.path, entry.path)) > SPACE_PATH_MAX:
        raise _refused("its path is too long for what it is", entry.path)
    end = 0
    for offset, length in entry.runs:
        if offset < end or length <= 0 or offset + length > entry.size:
            raise _refused("runs overlap, are out of order or outside of the file", entry.path)
        end = offset + length
