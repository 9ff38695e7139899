"""Looks now and then, in a background thread beside the rounds of a controller, for instances that nobody wants any more.

And for what fleets made besides, such as launch templates.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

from savedworker.controller.reaping import reap, tidy
from savedworker.fleet.base import Fleet, keeping_fleets
from savedworker.model import defaults
from savedworker.model.errors import SavedWorkerError
from savedworker.store.backend import Store

log = logging.getLogger(__name__)


class Reaper:
    """Reaps all configured fleets, and those that ``names`` gives, every ``every`` seconds.

    The first time is drawn from that span, so that many controllers do not ask at once, and one that lives for a moment does not ask.
    """

    def __init__(
        self,
        store: Store,
        names: Callable[[], Sequence[str]],
        *,
        every: float = defaults.REAP_EVERY,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._names = names
        self._every = every
        self._draw = draw
        self._stop = threading.Event()
        # A daemon: it may be cut off anywhere.
        self._thread = threading.Thread(target=self._work, name="reaper", daemon=True)

    def __enter__(self) -> Reaper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        pause = self._every * self._draw()
        while not self._stop.wait(pause):
            self.round()
            pause = self._every

    def round(self) -> None:
        """Look once at all fleets."""
        try:
            for fleet in keeping_fleets(self._names()):
                self._look_at(fleet)
        except SavedWorkerError as error:  # the fleet file cannot be used
            log.warning("instances that nobody wants could not be looked for: %s", error)
        except Exception:  # the controller's own work must not end of it
            log.exception("unexpected while looking for instances that nobody wants")

    def _look_at(self, fleet: Fleet) -> None:
        """Trouble with one fleet must not keep the others' instances."""
        for look in (reap, tidy):
            try:
                look(self._store, fleet)
            except SavedWorkerError as error:
                log.warning("what nobody wants of fleet %s could not be looked for: %s", fleet.name, error)
            except Exception:
                log.exception("unexpected while looking for what nobody wants of fleet %s", fleet.name)
