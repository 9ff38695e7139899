"""Images: host, a root directory, an OCI layout; users of the image; and one clear line for what is not there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from savedworker.checkpoint.images import find_user, lower_directory
from savedworker.model.errors import BadSpec


def test_host_is_the_root_of_this_instance(tmp_path: Path) -> None:
    assert lower_directory("host", tmp_path) == Path("/")


def test_a_root_directory_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    assert lower_directory(str(tmp_path), tmp_path / "cache") == tmp_path


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("/no/such/image", "image /no/such/image is not a directory"),
        ("{tmp}", "has no bin, sbin or usr"),
        ("oci:/no/such/layout", "/no/such/layout has no OCI layout"),
        ("oci:{tmp}:v1", "has no OCI layout"),
    ],
)
def test_an_image_that_is_not_there_is_one_clear_line(tmp_path: Path, image: str, message: str) -> None:
    with pytest.raises(BadSpec) as caught:
        lower_directory(image.format(tmp=tmp_path), tmp_path / "cache")
    assert message in caught.value.message
    assert caught.value.fix
    assert "\n" not in str(caught.value)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """An OCI layout with the tag v1, whose image has one file."""
    made = tmp_path / "layout"
    root = tmp_path / "unpacked"
    subprocess.run(["umoci", "init", "--layout", made], check=True)
    subprocess.run(["umoci", "new", "--image", f"{made}:v1"], check=True)
    subprocess.run(["umoci", "unpack", "--image", f"{made}:v1", root], check=True)
    (root / "rootfs/usr").mkdir()
    (root / "rootfs/usr/hello").write_text("one")
    subprocess.run(["umoci", "repack", "--image", f"{made}:v1", root], check=True)
    return made


def test_an_oci_layout_is_unpacked_once_and_again_when_it_changed(tmp_path: Path, layout: Path) -> None:
    cache = tmp_path / "cache"
    first = lower_directory(f"oci:{layout}:v1", cache)
    assert (first / "usr/hello").read_text() == "one"
    (first / "usr/mark").touch()
    assert lower_directory(f"oci:{layout}:v1", cache) == first
    assert (first / "usr/mark").exists()
    work = tmp_path / "again"
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:v1", work], check=True)
    (work / "rootfs/usr/hello").write_text("two")
    subprocess.run(["umoci", "repack", "--image", f"{layout}:v1", work], check=True)
    second = lower_directory(f"oci:{layout}:v1", cache)
    assert (second / "usr/hello").read_text() == "two"
    assert sorted(p.name for p in cache.iterdir()) == sorted({first.parent.name, second.parent.name})


def test_a_tag_that_is_not_there_and_a_damaged_layout_are_one_clear_line_and_leave_nothing(
    tmp_path: Path, layout: Path
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(BadSpec, match="cannot be unpacked"):
        lower_directory(f"oci:{layout}:v2", cache)
    shutil.rmtree(layout / "blobs")
    with pytest.raises(BadSpec, match="cannot be unpacked"):
        lower_directory(f"oci:{layout}:v1", cache)
    assert list(cache.iterdir()) == []


@pytest.fixture
def people(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:n:/nonexistent:/bin/false\nann:x:1001:1002:Ann:/home/ann:/bin/sh\n# bad\nbroken\n"
    )
    (tmp_path / "etc/group").write_text("root:x:0:\nvideo:x:44:ann,bob\ndocker:x:999:bob\nstaff:x:1002:ann\n")
    return tmp_path


@pytest.mark.parametrize(
    ("user", "wanted"),
    [
        (None, (0, 0, [], "/root")),
        ("root", (0, 0, [], "/root")),
        ("nobody", (65534, 65534, [], "/nonexistent")),
        ("ann", (1001, 1002, [44], "/home/ann")),
        ("1001", (1001, 1002, [44], "/home/ann")),
        ("1000", (1000, 0, [], "/")),
        ("1000:44", (1000, 44, [], "/")),
        ("ann:docker", (1001, 999, [44, 1002], "/home/ann")),
    ],
)
def test_a_user_is_looked_up_in_the_image(
    people: Path, user: str | None, wanted: tuple[int, int, list[int], str]
) -> None:
    assert find_user(people, user) == wanted


def test_an_unknown_user_or_group_is_one_clear_line(people: Path) -> None:
    with pytest.raises(BadSpec, match="user 'eve' is not in the image's /etc/passwd"):
        find_user(people, "eve")
    with pytest.raises(BadSpec, match="group 'wheel' is not in the image's /etc/group"):
        find_user(people, "ann:wheel")


def test_an_image_without_users_knows_numbers_only(tmp_path: Path) -> None:
    assert find_user(tmp_path, "1000") == (1000, 0, [], "/")
    with pytest.raises(BadSpec):
        find_user(tmp_path, "nobody")
