"""What LocalFleet refuses, and what it gives its agents: no root needed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from savedworker.fleet.base import get_fleet
from savedworker.fleet.local import LocalFleet
from savedworker.fleet.local.fleet import _clouds, _environment
from savedworker.fleet.local.host import HostDir
from savedworker.model.errors import Refused
from savedworker.model.spec import Output, WorkerSpec
from tests.fleet.conftest import request_for


def given(store: str, spec: WorkerSpec | None = None) -> tuple[str, ...]:
    """What the agent of a worker in ``store`` gets of the clouds' variables."""
    request = request_for("l", store=store)
    return _clouds(replace(request, spec=spec) if spec else request)


def test_without_root_everything_is_refused_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    fleet = LocalFleet(tmp_path)
    for call in (
        lambda: fleet.launch(request_for("a")),
        lambda: fleet.describe(["a"]),
        lambda: fleet.terminate("a"),
        lambda: fleet.preempt("a", None),
    ):
        with pytest.raises(Refused, match="needs root") as refused:
            call()
        assert "sudo" in refused.value.fix
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("launch", ["", ".", "..", "a/b", "../a", "a b", "x" * 129, "-a"])
def test_a_launch_id_that_is_no_plain_name_is_refused(tmp_path: Path, launch: str) -> None:
    with pytest.raises(Refused, match="not usable"):
        LocalFleet(tmp_path).launch(request_for(launch))


@pytest.mark.parametrize(
    ("name", "value"), [("CAPACITY", "many"), ("CAPACITY", "-1"), ("AGENT", "sleep"), ("AGENT", "[]")]
)
def test_a_bad_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"SAVEDWORKER_LOCAL_{name}", value)
    with pytest.raises(Refused, match=f"SAVEDWORKER_LOCAL_{name}"):
        LocalFleet()


def test_the_agent_gets_these_arguments(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path)
    host = HostDir(tmp_path / "hosts" / "l-1")
    command = fleet._agent_command(host, request_for("l-1", store="s3://b/p"), "host-3f2a", "local-b")
    assert list(command) == [
        *(
            sys.executable,
            "-m",
            "savedworker.cli",
            "agent",
            "--store",
            "s3://b/p",
            "--worker",
            "w",
            "--launch",
            "l-1",
        ),
        *("--fleet", "local", "--instance", "host-3f2a", "--zone", "local-b"),
        *("--state-dir", f"{tmp_path}/hosts/l-1/scratch/agent", "--cgroup-parent", "/savedworker/host-3f2a"),
    ]


def test_the_agent_gets_a_small_environment_with_what_its_store_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        os,
        "environ",
        {
            "PATH": "/home/me/bin",
            "SAVEDWORKER_KEY": "k",
            "SAVEDWORKER_LOCAL_AGENT": "[]",
            "AWS_SECRET_ACCESS_KEY": "a",
            "GOOGLE_APPLICATION_CREDENTIALS": "g",
            "LD_PRELOAD": "evil.so",
            "https_proxy": "http://p",
        },
    )
    plain = {"PATH", "HOME", "LANG", "PYTHONSAFEPATH", "SAVEDWORKER_KEY", "https_proxy"}
    assert set(_environment(given("file:///s"))) == plain
    assert set(_environment(given("s3://b"))) == plain | {"AWS_SECRET_ACCESS_KEY"}
    assert set(_environment(given("gs://b"))) == plain | {"GOOGLE_APPLICATION_CREDENTIALS"}
    wants = WorkerSpec(
        id="w", command=("true",), credentials="instance", outputs=(Output(path="/x", url="gs://b/x"),)
    )
    both = {"AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"}
    assert set(_environment(given("file:///s", wants))) == plain | both
    assert _environment(given("s3://b"))["PATH"].startswith("/opt/savedworker/bin:")


def test_the_keys_of_a_launch_go_before_those_of_the_fleets_own_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"SAVEDWORKER_KEY": "mine", "SAVEDWORKER_ALLOW_PLAIN": "1"})
    found = _environment(given("file:///s"), {"SAVEDWORKER_KEY_FILE": "/keys/key"})
    assert {name for name in found if name.startswith("SAVEDWORKER_")} == {"SAVEDWORKER_KEY_FILE"}
    assert found["SAVEDWORKER_KEY_FILE"] == "/keys/key"
    assert _environment(given("file:///s"))["SAVEDWORKER_KEY"] == "mine"


def test_the_local_fleet_is_found_by_its_name() -> None:
    fleet = get_fleet("local")
    assert isinstance(fleet, LocalFleet)
    assert fleet.lease_term == 10.0
