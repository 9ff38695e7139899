"""The tokens that the relay presents. The worker has none: it would be in every checkpoint, and stale after a move.

They come from two sides: whoever looks after the worker for the engine writes a document beside it in the store (sealed where a key is
configured) and renews it in time; and the engine's server hands out a fresh one when one that it sees is about to expire.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import threading
import time
from collections.abc import Callable

from pydantic import ValidationError

from savedworker.model.base import Document
from savedworker.model.errors import SavedWorkerError

log = logging.getLogger(__name__)

SOON = 30.0
"""Seconds before the expiry of the best token at which another one is looked for."""
LOOK_EVERY = 2.0


class TokenNote(Document):
    """The document in the store."""

    token: str


def expiry(token: str) -> float:
    """When the JSON web token expires, in seconds since the epoch, unverified; 0 if it does not say."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return 0.0


class Tokens:
    """The freshest token known. ``load`` reads the document; ``now`` is the time since the epoch in seconds."""

    def __init__(self, load: Callable[[], bytes | None], now: Callable[[], float] = time.time) -> None:
        self._load = load
        self._now = now
        self._lock = threading.Lock()
        self._best = ""
        self._looked = float("-inf")

    def best(self) -> str:
        """The token to present now; empty when none is known yet."""
        if expiry(self._best) - self._now() < SOON:
            self._look()
        return self._best

    def offer(self, token: str) -> None:
        """The server handed this one out."""
        with self._lock:
            if expiry(token) > expiry(self._best):
                self._best = token

    def fresher_than(self, refused: str) -> bool:
        """After the server refused ``refused``: look for another one. True when there is one, or may be soon."""
        self._look()
        return self._best != refused or expiry(refused) - self._now() < SOON

    def _look(self) -> None:
        with self._lock:
            if time.monotonic() - self._looked < LOOK_EVERY:
                return
            self._looked = time.monotonic()
        try:
            found = self._load()
            if found is not None:
                self.offer(TokenNote.model_validate_json(found).token)
        except (SavedWorkerError, ValidationError) as error:
            log.warning("the engine's token cannot be read: %s", error)
