"""A controller looks now and then for instances that nobody wants; trouble with one fleet does not stop it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from savedworker.cli import reaper
from savedworker.cli.reaper import Reaper
from savedworker.fleet.base import Fleet, Owned
from savedworker.model.errors import Temporary
from savedworker.store.backend import open_store


class Kept:
    """A fleet with one instance of a worker that is not there, beside one that is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended: list[str] = []
        self.trouble: list[Exception] = []
        self.asked = threading.Event()

    def owned(self, store_url: str) -> Sequence[Owned]:
        self.asked.set()
        if self.trouble:
            raise self.trouble.pop()
        return [] if self.ended else [Owned("l-1", "gone", "i-1")]

    def terminate(self, launch: str) -> None:
        self.ended.append(launch)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    opened = open_store((tmp_path / "store").as_uri())
    opened.ensure()
    opened.put("workers/other/spec.json", b"{}")  # else it would look like a store that is not mounted
    return opened


def reaping(store: Any, monkeypatch: pytest.MonkeyPatch, *fleets: Kept, **more: Any) -> Reaper:
    asked: list[Sequence[str]] = []

    def keeping(names: Sequence[str]) -> Iterator[Fleet]:
        asked.append(names)
        yield from fleets  # type: ignore[misc]

    monkeypatch.setattr(reaper, "keeping_fleets", keeping)
    made = Reaper(store, lambda: ["spot"], **more)
    made.seen = asked  # type: ignore[attr-defined]
    return made


def test_it_ends_what_is_left_over_and_asks_for_the_fleets_of_the_workers(
    store: Any, monkeypatch: pytest.MonkeyPatch
):
    fleet = Kept("spot")
    made = reaping(store, monkeypatch, fleet)
    made.round()
    made.round()
    assert fleet.ended == ["l-1"]
    assert made.seen == [["spot"], ["spot"]]  # type: ignore[attr-defined]


def test_trouble_is_logged_and_over_the_next_time(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fleet = Kept("spot")
    fleet.trouble = [ValueError("a defect"), Temporary("AWS asks to slow down")]
    made = reaping(store, monkeypatch, fleet)
    made.round()
    made.round()
    assert fleet.ended == []
    assert "AWS asks to slow down" in caplog.text
    assert "unexpected" in caplog.text
    made.round()
    assert fleet.ended == ["l-1"]


def test_trouble_with_one_fleet_does_not_keep_the_instances_of_the_others(
    store: Any, monkeypatch: pytest.MonkeyPatch
):
    first, second, third = (Kept(name) for name in ("a", "b", "c"))
    first.trouble, second.trouble = [Temporary("no credentials")], [ValueError("a defect")]
    reaping(store, monkeypatch, first, second, third).round()
    assert (first.ended, second.ended, third.ended) == ([], [], ["l-1"])


def test_what_fleets_made_besides_is_tidied_too(store: Any, monkeypatch: pytest.MonkeyPatch):
    tidied: list[str] = []

    class Made(Kept):
        def tidy(self, store_url: str, environment: Any, *, dry_run: bool = False) -> Sequence[str]:
            tidied.append(store_url)
            return ["launch template x"]

    fleet = Made("spot")
    fleet.trouble = [Temporary("AWS asks to slow down")]
    reaping(store, monkeypatch, fleet).round()
    assert tidied == [store.url]


def test_it_works_beside_a_controller_and_stops_with_it(store: Any, monkeypatch: pytest.MonkeyPatch):
    fleet = Kept("spot")
    with reaping(store, monkeypatch, fleet, every=1000.0, draw=lambda: 0.0):
        assert fleet.asked.wait(30)
    late = Kept("spot")
    with reaping(store, monkeypatch, late, every=1000.0, draw=lambda: 1.0):
        pass
    assert not late.asked.is_set()
    assert "reaper" not in {x.name for x in threading.enumerate()}
