"""Arguments, spec file and environment become one spec, by the documented precedence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from savedworker.cli.build_spec import SpecOptions, build_spec, generate_id
from savedworker.model.spec import Volume, WorkerSpec
from tests.cli.conftest import Shell
from tests.model.policies import WRITTEN, as_read, as_written, of

pytestmark = pytest.mark.usefixtures("shell")


def spec(cwd: Path = Path("/"), environ: dict[str, str] | None = None, **given) -> WorkerSpec:
    return build_spec(
        SpecOptions(**{"command": ("true",), "fleet": "fake-local", **given}), environ or {}, cwd
    )[0]


def spec_file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    return str(file)


def test_an_argument_goes_before_the_file_and_the_file_before_the_environment(tmp_path: Path):
    environ = {
        "SAVEDWORKER_CHECKPOINT_INTERVAL": "1m",
        "SAVEDWORKER_MAX_MIGRATIONS": "7",
        "SAVEDWORKER_NETWORK": "host",
    }
    file = spec_file(tmp_path, "checkpoint: {interval: 2m, keep: 3}\nmax_migrations: 5\nmemory: 1GiB")
    both = spec(environ=environ, spec=file, checkpoint_interval="3m")
    assert (both.checkpoint.interval, both.checkpoint.keep, both.max_migrations, both.network) == (
        180,
        3,
        5,
        "host",
    )
    assert spec(environ=environ, spec=file).checkpoint.interval == 120
    plain = spec(environ=environ)
    assert (plain.checkpoint.interval, plain.max_migrations) == (60, 7)
    assert spec(max_migrations=0).max_migrations == 0
    assert spec().checkpoint.interval == 300


def test_off_turns_periodic_checkpoints_off(tmp_path: Path):
    assert spec(checkpoint_interval="off").checkpoint.interval is None
    assert spec(spec=spec_file(tmp_path, "checkpoint: {interval: off}")).checkpoint.interval is None


def test_a_spec_file_takes_friendly_forms_and_leaves_words_as_written(tmp_path: Path):
    text = """
command: [sleep, 010, yes, 1.50, null-ish, "null"]
env: {A: 010, B: no, C: 2026-01-01, "D": ""}
volumes: ["/tmp:/data:ro", {source: /tmp, target: /out}]
memory: 4GiB
cpus: 1.5
lease_term: 30s
orphan_after: 1h30m
max_migrations: null
placement: {wait_for_capacity: 10m}
"""
    made = spec(command=(), spec=spec_file(tmp_path, text))
    assert made.command == ("sleep", "010", "yes", "1.50", "null-ish", "null")
    assert made.env == {"A": "010", "B": "no", "C": "2026-01-01", "D": ""}
    assert made.volumes == (
        Volume(source="/tmp", target="/data", read_only=True),
        Volume(source="/tmp", target="/out"),
    )
    assert (made.memory, made.cpus, made.lease_term, made.orphan_after) == (4 << 30, 1.5, 30, 5400)
    assert made.max_migrations is None
    assert made.placement.wait_for_capacity == 600


@pytest.mark.parametrize("style", ["json", "yaml"])
def test_every_field_of_the_policies_can_be_written_in_a_spec_file(tmp_path: Path, style: str):
    given = {"command": ["true"], **{group: as_written(group) for group in WRITTEN}}
    file = tmp_path / f"spec.{style}"
    file.write_text(json.dumps(given) if style == "json" else yaml.safe_dump(given))
    made = spec(command=(), spec=str(file))
    for group in WRITTEN:
        assert of(made, group) == as_read(group)


def test_json_gives_the_same_spec_as_yaml(tmp_path: Path):
    file = tmp_path / "spec.json"
    file.write_text(
        json.dumps(
            {
                "id": "j",
                "command": ["echo", 5, "\U0001f600"],
                "memory": 1073741824,
                "checkpoint": {"interval": 90},
            }
        )
    )
    made = spec(command=(), spec=str(file))
    assert (made.command, made.memory, made.checkpoint.interval) == (("echo", "5", "\U0001f600"), 1 << 30, 90)


def test_the_stored_spec_of_a_worker_can_be_given_back_as_a_spec_file(tmp_path: Path):
    made = spec(
        name="again", volumes=("/tmp:/x:ro",), env=("A=1",), memory=1 << 30, checkpoint_interval="off"
    )
    file = tmp_path / "spec.json"
    file.write_text(made.model_dump_json(indent=1))
    assert spec(command=(), spec=str(file)) == made


def test_the_lease_term_is_the_fleets_unless_the_file_says_otherwise(tmp_path: Path):
    assert spec().lease_term == 2.0
    assert spec(spec=spec_file(tmp_path, "lease_term: 9")).lease_term == 9


def test_nothing_of_the_callers_environment_leaks_but_path_and_what_is_asked_for():
    environ = {"PATH": "/my/bin", "SECRET": "s", "WANTED": "w=1", "HOME": "/home/me"}
    assert spec(environ=environ).env == {"PATH": "/my/bin"}
    assert spec(environ=environ, fleet="fake").env == {}
    assert spec(environ=environ, image="/usr").env == {}
    assert spec(environ=environ, env=("WANTED", "X=", "PATH=/p")).env == {
        "WANTED": "w=1",
        "X": "",
        "PATH": "/p",
    }


def test_env_and_volumes_add_to_the_files_and_replace_the_same_name(tmp_path: Path):
    file = spec_file(tmp_path, "env: {A: file, B: file}\nvolumes: ['/usr:/a', '/usr:/b']")
    made = spec(spec=file, env=("B=argument",), volumes=("/tmp:/b:ro",))
    assert made.env == {"A": "file", "B": "argument"}
    assert [(v.source, v.target) for v in made.volumes] == [("/usr", "/a"), ("/tmp", "/b")]


def test_the_host_image_begins_in_the_callers_directory_and_others_at_the_root(tmp_path: Path):
    assert spec(cwd=Path("/usr/lib")).workdir == "/usr/lib"
    assert spec(cwd=Path("/usr/lib"), image="/usr").workdir == "/"
    assert spec(cwd=Path("/usr/lib"), fleet="fake").workdir == "/"
    assert spec(cwd=Path("/usr/lib"), spec=spec_file(tmp_path, "workdir: /opt")).workdir == "/opt"


def test_inputs_and_outputs_of_file_and_arguments(tmp_path: Path):
    (tmp_path / "data").mkdir()
    folder = (tmp_path / "data").as_uri() + "/"
    file = spec_file(
        tmp_path,
        "inputs: ['s3://b/a b#c:/a', {url: 'gs://b/x/', path: /x}]\noutputs: ['/o:s3://b/o', '/p:s3://b/p']",
    )
    made = spec(spec=file, inputs=(f"{folder}:/x",), outputs=("/new/:s3://b/p",))
    assert [(i.url, i.path) for i in made.inputs] == [("s3://b/a b#c", "/a"), (folder, "/x")]
    assert [(o.path, o.url) for o in made.outputs] == [("/o", "s3://b/o"), ("/new/", "s3://b/p")]


def test_a_directory_on_another_file_system_is_no_working_directory_unless_a_volume_shows_it():
    assert spec(cwd=Path("/proc/self")).workdir == "/"
    assert spec(cwd=Path("/dev/shm"), volumes=("/dev/shm:/dev/shm2",)).workdir == "/"
    assert spec(cwd=Path("/dev/shm2/x"), volumes=("/dev/shm:/dev/shm2",)).workdir == "/dev/shm2/x"


def test_relative_directories_are_the_callers_for_a_fleet_on_this_machine(tmp_path: Path):
    (tmp_path / "data").mkdir()
    made = spec(cwd=tmp_path, image="./data", volumes=("./data:/x",))
    assert (made.image, made.volumes[0].source) == (str(tmp_path / "data"), str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        (["python", "train.py", "--lr", "1"], "train-py"),
        (["/usr/bin/python3.11", "-u", "/x/Train Big.py"], "train-big-py"),
        (["python", "-m", "pkg.train"], "pkg-train"),
        (["bash", "-c", "echo hi"], "bash"),
        (["./résumé"], "r-sum"),
        (["é"], "worker"),
        (["x" * 100], "x" * 40),
    ],
)
def test_a_generated_id_can_be_read_and_is_always_valid(command: list[str], stem: str):
    made = generate_id(command)
    assert made.rsplit("-", 1)[0] == stem
    assert made != generate_id(command)
    spec(name=made)


def test_a_spec_on_stdin_works(shell: Shell):
    process = shell.start("submit", "--spec", "-", stdin=-1)
    out, err = process.communicate(b"id: from-stdin\ncommand: ['true']\n", timeout=30)
    assert (process.returncode, out, err) == (0, b"from-stdin\n", b"")
