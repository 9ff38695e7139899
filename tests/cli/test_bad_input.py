"""Bad input is one clear line with a fix, has the documented exit status, and leaves nothing in the store."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from savedworker.model import defaults
from tests.cli.conftest import Shell

NAMES = ["a/b", "../up", "é", "UPPER", "", "-x", "a" * 64, "a b", "a..b"]
ARGUMENTS = [
    (["--bogus", "--", "true"], "No such option '--bogus'"),
    ([], "no command is given"),
    (["--fleet", "nope", "--", "true"], "there is no fleet 'nope'"),
    (["--checkpoint-interval", "-5m", "--", "true"], "'-5m' is not a duration"),
    (["--checkpoint-interval", "0", "--", "true"], "too short"),
    (["--max-migrations", "-1", "--", "true"], "--max-migrations"),
    (["--volume", "nonsense", "--", "true"], "is not SRC:DST"),
    (["--volume", "data:/data", "--", "true"], "absolute path"),
    (["--volume", "/tmp:/proc", "--", "true"], "belongs to the worker's runtime"),
    (["--volume", "/tmp:/x:rx", "--", "true"], "is not SRC:DST"),
    (["--fleet", "fake-local", "--volume", "/not/there:/x", "--", "true"], "/not/there does not exist"),
    (["--fleet", "fake-local", "--image", "/not/there", "--", "true"], "there is no such directory"),
    (["--fleet", "fake-local", "--image", "oci:/not/there:tag", "--", "true"], "no OCI layout"),
    (["--image", "relative", "--", "true"], "image 'relative' is not"),
    (["--env", "NOT_SET_HERE", "--", "true"], "NOT_SET_HERE is not set here"),
    (["--env", "=x", "--", "true"], "has no name"),
    (["--memory", "lots", "--", "true"], "'lots' is not a size"),
    (["--cpus", "0", "--", "true"], "--cpus"),
    (["--cpus", "nan", "--", "true"], "cpus"),
    (["--network", "bridge", "--", "true"], "--network"),
    (["--user", "UPPER", "--", "true"], "user 'UPPER'"),
    (["--store", "ftp://x", "--", "true"], "unknown scheme"),
    (["--store", "", "--", "true"], "not a store"),
    (["--", ""], "needs a program name"),
]
SPECS = [
    ("command: [a\nfoo: {", "line 2", "not YAML"),
    ("\tcommand: [a]", "line 1", "not YAML"),
    ("command: [a]\ncommand: [b]", "line 2", "given twice"),
    ("command: [x]\ncolour: red", "colour", ""),
    ("command: python train.py", "not a list of words", ""),
    ("command: []", "no command", ""),
    ("command: [x]\nid: A/B", "worker id", ""),
    ("command: [x]\ncpus: lots", "cpus", ""),
    ("command: [x]\nlease_term: -5", "lease_term", "not a duration"),
    ("command: [x]\nvolumes: [a]", "volumes", "SRC:DST"),
    ("command: [x]\nenv: [A]", "env is not a mapping", ""),
    ("command: [x]\nenv: {A: }", "env.A has no value", ""),
    ("command: [x]\ncheckpoint: 5m", "checkpoint", ""),
    ("command: [x]\ncheckpoint:", "checkpoint: this must be a mapping of fields", "its fields are: interval"),
    ("command: [x]\nplacement: {spare: 5m}", "placement.spare: there is no such field", "spare_for"),
    ("command: [x]\nplacement: {spare_for: 5 min}", "placement.spare_for: '5 min' is not a duration", "30s"),
    ("command: [x]\nmemory: {a: b}", "memory: ", "is not a size"),
    ("command: [x]\nformat: one", "format", ""),
    ("", "empty", ""),
    ("just text", "a str", ""),
    ("!!python/object/apply:os.system [id]", "not YAML", ""),
]


def assert_refused(shell: Shell, result, status: int, text: str) -> None:
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("savedworker: ")
    assert text in lines[0]
    assert shell.nothing_created()


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize(("words", "text"), ARGUMENTS, ids=[" ".join(w) for w, _ in ARGUMENTS])
def test_a_bad_argument_is_one_line_with_status_2_and_creates_nothing(
    shell: Shell, verb: str, words: list[str], text: str
):
    assert_refused(shell, shell(verb, *words), 2, text)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_cannot_be_an_id_is_refused_with_status_2(shell: Shell, name: str):
    assert_refused(shell, shell("run", "--name", name, "--", "true"), 2, "is not usable")
    assert_refused(shell, shell("status", "--", name), 2, "is not usable")


@pytest.mark.parametrize(("text", "where", "what"), SPECS)
def test_a_malformed_spec_file_names_the_place_with_status_2(
    shell: Shell, tmp_path: Path, text: str, where: str, what: str
):
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    result = shell("run", "--spec", str(file))
    assert_refused(shell, result, 2, where)
    assert what in result.stderr


def test_a_malformed_json_spec_names_the_line(shell: Shell, tmp_path: Path):
    file = tmp_path / "spec.json"
    file.write_text('{"command": ["x"],\n "cpus": }')
    assert_refused(shell, shell("run", "--spec", str(file)), 2, "line 2, column 10: not JSON")


def test_a_spec_file_that_is_missing_a_directory_binary_or_huge_is_refused_with_status_2(
    shell: Shell, tmp_path: Path
):
    assert_refused(shell, shell("run", "--spec", str(tmp_path / "no.yaml")), 2, "cannot be read")
    assert_refused(shell, shell("run", "--spec", str(tmp_path)), 2, "cannot be read")
    file = tmp_path / "spec"
    file.write_bytes(b"\xff\xfe\x00")
    assert_refused(shell, shell("run", "--spec", str(file)), 2, "not UTF-8")
    file.write_bytes(b"#" * (2 << 20))
    assert_refused(shell, shell("run", "--spec", str(file)), 2, "longer than")


@pytest.mark.parametrize(
    "words",
    [
        ["bridge", "submit", "--json"],
        ["run", "--gpus", "1", "--", "true"],
    ],
)
def test_what_is_not_built_yet_is_refused_in_one_line_and_is_not_in_the_help(shell: Shell, words: list[str]):
    assert_refused(shell, shell(*[w for w in words if w != "--json"]), 2, "is not built yet")
    listed = shell("--help").stdout + shell("run", "--help").stdout
    for word in ("bridge", "--gpus"):
        assert f" {word} " not in listed


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--input", "data:/in"], "not URL:PATH"),
        (["--input", "s3://b/k:in"], "not URL:PATH"),
        (["--input", "http://b/k:/in"], "not URL:PATH"),
        (["--input", "s3://b:/in"], "is not s3://BUCKET/NAME"),
        (["--input", "s3://b/../k:/in"], "is not s3://BUCKET/NAME"),
        (["--input", "s3://b/k:/"], "below /"),
        (["--input", "s3://b/k:/a/../../in"], "without '..'"),
        (["--input", "s3://b/k:/dev/shm/x"], "belongs to the worker's runtime"),
        (["--input", "s3://b/k:/data/x", "--volume", "/tmp:/data"], "is on a volume"),
        (["--input", "file:///no/such/thing:/in"], "there is no such file"),
        (["--input", "file:///tmp:/in"], "a folder is written with a slash"),
        (["--output", "out:s3://b/k"], "not PATH:URL"),
        (["--output", "/out:/k"], "not PATH:URL"),
        (["--output", "/proc/x:s3://b/k"], "belongs to the worker's runtime"),
        (["--credentials", "instance", "--network", "host"], "credentials cannot be served"),
    ],
)
def test_inputs_and_outputs_that_cannot_be_meant(shell: Shell, words: list[str], what: str):
    assert_refused(shell, shell("submit", "--fleet", "local", *words, "--", "true"), 2, what)


def test_a_report_that_cannot_be_written_is_refused_before_there_is_a_worker(shell: Shell):
    assert_refused(shell, shell("run", "--report", "/no/such/dir/x", "--", "true"), 2, "cannot be written")
    assert shell.json("list") == []


def test_a_spec_that_is_nested_too_deeply_is_one_line(shell: Shell, tmp_path: Path):
    file = tmp_path / "deep.json"
    file.write_text('{"command":' * 5000)
    assert_refused(shell, shell("submit", "--spec", str(file)), 2, "nested too deeply")


def test_a_damaged_record_is_said_and_the_other_workers_are_listed(shell: Shell):
    for name in ("good", "bad"):
        assert shell("submit", "--name", name, "--", "true").exit_code == 0
    for version in (shell.store / "workers/bad/record.json@").iterdir():
        version.write_text('{"a": 1}')
    result = shell("list")
    assert result.exit_code == 1
    assert "good" in result.stdout
    assert "savedworker: bad is left out: " in result.stderr


def test_a_registry_image_is_refused_with_status_2(shell: Shell):
    assert_refused(shell, shell("run", "--image", "docker://", "--", "true"), 2, "is not docker://")


def test_an_option_that_is_only_there_to_be_refused_is_never_suggested(shell: Shell):
    assert "--gpus" not in shell("run", "--gpu", "1", "--", "true").stderr


def test_with_json_an_error_is_one_object_of_code_message_and_fix_on_stderr(shell: Shell):
    for words in (
        ["run", "--json"],
        ["status", "nope", "--json"],
        ["list", "--json", "--bogus"],
        ["run", "--json", "--name", "A", "--", "x"],
    ):
        result = shell(*words)
        assert result.stdout == ""
        assert set(json.loads(result.stderr)) == {"code", "message", "fix"}


def test_json_after_the_double_dash_belongs_to_the_command(shell: Shell):
    assert shell("run", "--name", "A", "--", "x", "--json").stderr.startswith("savedworker: ")


@pytest.mark.parametrize(
    ("verb", "status"),
    [
        ("status", 1),
        ("report", 1),
        ("logs", 1),
        ("cancel", 1),
        ("checkpoint", 1),
        ("preempt", 1),
        ("wait", 125),
    ],
)
def test_an_unknown_worker_is_status_1_and_for_wait_125(shell: Shell, verb: str, status: int):
    assert_refused(shell, shell(verb, "nobody"), status, "there is no worker nobody")


def test_a_store_that_is_a_file_is_refused(shell: Shell, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("x")
    for verb, status in (("run", 2), ("list", 2)):
        words = [verb, "--store", f"file://{file}", *(["--", "true"] if verb == "run" else [])]
        assert_refused(shell, shell(*words), status, "is not a directory")


def test_a_store_that_cannot_be_made_is_one_line(shell: Shell):
    assert_refused(shell, shell("submit", "--store", "/proc/nowhere", "--", "true"), 1, "/proc/nowhere")
    assert_refused(shell, shell("run", "--store", "/proc/nowhere", "--", "true"), 125, "/proc/nowhere")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["run", "--", "true"], 125),
        (["wait", "w"], 125),
        (["submit", "--", "true"], 1),
        (["list"], 1),
        (["controller", "--until-idle"], 1),
    ],
)
def test_an_unreachable_store_fails_in_time(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(defaults, "STORE_TIMEOUT", 2.0)
    begin = time.monotonic()
    result = shell(words[0], "--store", "s3://bucket/prefix", *words[1:])
    assert_refused(shell, result, status, "s3://bucket/prefix") if words[0] != "controller" else None
    assert result.exit_code == status
    assert time.monotonic() - begin < 2 * 2.0 + 2
    assert defaults.STORE_TIMEOUT < 30


def test_the_time_limit_of_the_store_is_well_below_30_seconds():
    assert defaults.STORE_TIMEOUT <= 25


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise RuntimeError("deep\ntrouble")

    monkeypatch.setattr("savedworker.controller.client.Client.list", broken)
    result = shell("list")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "savedworker: unexpected RuntimeError: deep. Fix: set SAVEDWORKER_DEBUG=1 to see where, and report it"
    ]
    assert isinstance(shell("list", SAVEDWORKER_DEBUG="1").exception, RuntimeError)


def test_output_that_nobody_reads_is_no_traceback(shell: Shell):
    read, write = os.pipe()
    os.close(read)
    process = shell.start("list", "--json", stdout=write)
    os.close(write)
    assert (process.communicate(timeout=20)[1], process.returncode) == (b"", 1)
