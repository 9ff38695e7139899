"""A bad specification is one clear line that names the field; a good one comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model import defaults
from savedworker.model.errors import BadSpec, SavedWorkerError
from savedworker.model.spec import Volume, WorkerSpec, check_worker_id, parse_spec

GOOD: dict[str, Any] = {"id": "w", "command": ["true"]}


@pytest.mark.parametrize("name", ["a", "7", "a.b", "a_b-c", "x" * 63, "train-2026-01-01t00.00"])
def test_a_good_name(name: str) -> None:
    assert check_worker_id(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "a b",
        "a/b",
        "/a",
        "../a",
        "a..b",
        ".a",
        "a.",
        "-a",
        "a-",
        "é",
        "ａ",
        "a\n",
        "a\0",
        "x" * 64,
        "٣",
        "a:b",
        "a@",
    ],
)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(BadSpec, match="is not usable") as caught:
        check_worker_id(name)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


BAD: list[tuple[dict[str, Any], str]] = [
    ({"id": "A/B"}, "id: worker id 'A/B' is not usable"),
    ({"id": None}, "id: Input should be a valid string"),
    ({"command": []}, "command: "),
    ({"command": "python train.py"}, "command: this must be a list"),
    ({"command": [""]}, "command: the command needs a program name"),
    ({"command": ["a", "b\0c"]}, "command: the command needs a program name and no NUL characters"),
    ({"command": ["a", 5]}, "command.1: Input should be a valid string"),
    ({"command": ["caf\udce9"]}, "command: 'caf\\udce9' is not Unicode text"),
    ({"colour": "red"}, "colour: there is no such field"),
    ({"co\nlour": "red"}, "'co\\nlour': there is no such field"),
    ({"env": {"": "x"}}, "env: environment variable '' cannot be set"),
    ({"env": {"A=B": "x"}}, "env: environment variable 'A=B' cannot be set"),
    ({"env": {"A": "x\0"}}, "env: environment variable 'A' cannot be set"),
    ({"env": {"A": 5}}, "env.A: Input should be a valid string"),
    ({"env": ["A"]}, "env: Input should be a valid dictionary"),
    ({"env": {"\udc80": "x"}}, "env: '\\udc80' is not Unicode text"),
    ({"user": "Root"}, "user: user 'Root' is not a name or number"),
    ({"user": "root:"}, "user: user 'root:'"),
    ({"user": "a b"}, "user: user 'a b'"),
    ({"user": "٣"}, "user: user '٣'"),
    ({"memory": 4096}, "memory: 4096 bytes are too few to start anything; give 8MiB or more"),
    ({"cpus": 0.005}, "cpus: 0.005 is too little to start anything; give 0.01 or more"),
    ({"lease_term": 0.01}, "lease_term: Input should be greater than or equal to 1"),
    ({"orphan_after": 0}, "orphan_after: Input should be greater than 0"),
    ({"checkpoint": "5m"}, "checkpoint: this must be a mapping of fields"),
    ({"workdir": "tmp"}, "workdir: 'tmp' must be an absolute path"),
    ({"workdir": "/a\0"}, "workdir: "),
    ({"image": "alpine"}, "image: image 'alpine' is not 'host', an absolute directory"),
    ({"image": "docker://Alpine"}, "image: image 'docker://Alpine' is not docker://[HOST/]NAME"),
    ({"image": "oci:relative"}, "image: image 'oci:relative'"),
    ({"image": "/a\0b"}, "image: "),
    ({"network": "bridge"}, "network: Input should be 'private' or 'host'"),
    (
        {"volumes": [{"source": "data", "target": "/data"}]},
        "volumes.0.source: 'data' must be an absolute path",
    ),
    (
        {"volumes": [{"source": "/a/../b", "target": "/x"}]},
        "volumes.0.source: '/a/../b' must be an absolute path",
    ),
    ({"volumes": [{"source": "/a", "target": "/"}]}, "volumes.0.target: '/' belongs to the worker's runtime"),
    ({"volumes": [{"source": "/a", "target": "//proc/"}]}, "volumes.0.target: '/proc' belongs"),
    ({"volumes": [{"source": "/a", "target": "/dev/shm/x"}]}, "volumes.0.target: '/dev/shm/x' belongs"),
    ({"volumes": [{"source": "/a", "target": "/.savedworker"}]}, "volumes.0.target: "),
    (
        {"volumes": [{"source": "/a", "target": "/x"}, {"source": "/b", "target": "//x//"}]},
        "two volumes have the same target",
    ),
    ({"memory": 0}, "memory: 0 bytes are too few to start anything"),
    ({"memory": "lots"}, "memory: Input should be a valid integer"),
    ({"cpus": 0}, "cpus: 0 is too little to start anything"),
    ({"cpus": float("nan")}, "cpus: "),
    ({"cpus": float("inf")}, "cpus: "),
    ({"max_migrations": -1}, "max_migrations: Input should be greater than or equal to 0"),
    ({"max_migrations": 1.5}, "max_migrations: "),
    ({"lease_term": 0}, "lease_term: Input should be greater than or equal to 1"),
    ({"checkpoint": {"bandwidth": 5}}, "checkpoint.bandwidth: Input should be greater than or equal to 1024"),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep: Input should be greater than or equal to 1"),
    ({"checkpoint": {"interval": -5}}, "checkpoint.interval: "),
    ({"placement": {"wait_for_capacity": float("inf")}}, "placement.wait_for_capacity: "),
    ({"format": 2}, "format: format 2 is of a newer version of Saved Worker"),
    ({"format": 0}, "format: Input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("fields", "text"), BAD, ids=[ascii(fields)[:50] for fields, _ in BAD])
def test_a_bad_specification_is_one_line_that_names_the_field(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSpec) as caught:
        parse_spec({**GOOD, **fields}, "job.yaml")
    message = str(caught.value)
    assert message.startswith(f"job.yaml: {text}")
    assert "\n" not in message
    assert caught.value.code == "spec_error"


@pytest.mark.parametrize("field", ["id", "command"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(BadSpec, match=f"spec: {field}: this field is missing"):
        parse_spec({k: v for k, v in GOOD.items() if k != field})


@pytest.mark.parametrize("data", [None, [], "id: a", 5])
def test_what_is_no_mapping_is_refused(data: object) -> None:
    with pytest.raises(BadSpec, match="is a mapping"):
        parse_spec(data)


@given(
    st.dictionaries(
        st.sampled_from(sorted(WorkerSpec.model_fields)) | st.text(max_size=8),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.text(), max_size=3)
        | st.dictionaries(st.text(max_size=5), st.text(), max_size=2),
        max_size=5,
    )
)
def test_whatever_is_given_the_answer_is_a_spec_or_one_line(data: dict[str, Any]) -> None:
    try:
        spec = parse_spec({**GOOD, **data})
    except SavedWorkerError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - either outcome is right
    else:
        assert WorkerSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    "user", ["root", "1000", "1000:1000", "root:wheel", "1000:users", "_apt", "www-data:33"]
)
def test_users_are_names_or_numbers(user: str) -> None:
    assert parse_spec({**GOOD, "user": user}).user == user


def test_the_defaults_are_the_documented_ones() -> None:
    spec = parse_spec(GOOD)
    assert (spec.checkpoint.interval, spec.checkpoint.keep) == (300, 2)
    assert spec.checkpoint.restores_without_progress == 3
    assert (spec.checkpoint.wait_for_match, spec.checkpoint.when_unrestorable) == (600, "cold_start")
    assert (spec.placement.wait_for_capacity, spec.placement.avoid_reclaimed) == (1800, 1800)
    assert spec.max_migrations is None
    assert (spec.lease_term, defaults.LEASE_TERM_LOCAL) == (60, 10)
    assert (spec.orphan_after, spec.retention) == (86400, 7 * 86400)


@pytest.mark.parametrize(
    ("text", "volume"),
    [
        ("/a:/b", Volume(source="/a", target="/b")),
        ("/a/:/b//c:ro", Volume(source="/a", target="/b/c", read_only=True)),
        ("/a:/b:rw", Volume(source="/a", target="/b")),
    ],
)
def test_a_volume_is_read(text: str, volume: Volume) -> None:
    assert Volume.parse(text) == volume


@pytest.mark.parametrize(
    "text", ["", "/a", "a:/b", "/a:b", "/a:/b:rx", "/a:/b:ro:x", "/a:", ":/b", "/a:/proc"]
)
def test_a_bad_volume_is_refused(text: str) -> None:
    with pytest.raises(BadSpec, match="volume") as caught:
        Volume.parse(text)
    assert len(str(caught.value).splitlines()) == 1


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(parse_spec(GOOD), "id", "other")  # noqa: B010
