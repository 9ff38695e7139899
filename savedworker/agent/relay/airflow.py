"""What the calls of an Airflow task mean (the Execution API of Airflow 3), and what the relay does about each.

The task may be frozen, moved, restored from an older checkpoint or started again; for Airflow it is one process that kept running.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from savedworker.agent.inner.web import Answer, Limits, NoAnswer, Request, WebServer, listen
from savedworker.agent.relay import journal as tapes
from savedworker.agent.relay.gate import Gate, Pass, Shut
from savedworker.agent.relay.pieces import Call, Notes
from savedworker.agent.relay.tokens import Tokens
from savedworker.agent.relay.upstream import MAX_BODY, Upstream
from savedworker.checkpoint.network import GATEWAY
from savedworker.model.base import Document
from savedworker.model.errors import Corrupt, Fenced, SavedWorkerError, Temporary
from savedworker.model.spec import RelaySpec
from savedworker.store.documents import read_twice

log = logging.getLogger(__name__)

PORT = 7411
"""Where the worker finds the relay, on its gateway's address."""
PATH = "/execution"
INNER_URL = f"http://{GATEWAY}:{PORT}{PATH}/"
"""The Execution API as the worker sees it, on every instance."""
TOKEN, CONCLUSION, JOURNAL, IDENTITY, HEARTBEAT = (
    "airflow-token",
    "airflow-conclusion",
    "airflow-journal",
    "airflow-identity",
    "airflow-heartbeat",
)
"""Names of the notes beside the worker in the store."""
API_VERSION = "airflow-api-version"
HEARTBEAT_EVERY = 5.0
HEARTBEAT_TIMEOUT = 4.0
"""The task waits no longer for the answer to one, so that a server that is away is no reason to hold it up."""
CALL_TIMEOUT = 30.0
DRAIN = 10.0
"""Seconds for which calls under way are waited for before a freeze; what is cut off is asked again by the task."""
_AGAIN = frozenset({429, 502, 503, 504})
"""Answers that say nothing about the call itself."""
_NO_ANSWER = frozenset({401, 403})
"""These say something about the token, and nothing about what was to be read."""
_RETRY_FIRST, _RETRY_MOST = 0.2, 5.0
_STORE_PATIENCE = 60.0
_ONCE = "/dag-runs/"
"""What begins or clears another run takes effect anew each time. All other calls are made again when they come again: they put one value
in the place of another, and what the task reads afterwards must be what it wrote last."""
_LIVE = "/connections/"
"""A task cannot have overwritten these itself, and what was good before a long absence may have expired: always asked for anew."""
_RANGE = "content-range"
"""How many XComs there are is answered in this header."""
_DONE_ALREADY = frozenset({404, 409, 410})
"""How a call that comes again may be refused, because it was accepted the first time."""
_EFFECT = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_TASK = re.compile(r"/task-instances/([0-9A-Za-z-]+)/(run|state|heartbeat)")


class Identity(Document):
    """Who the task instance runs as in Airflow's database: told at its start, and true for the worker's whole life."""

    pid: int
    hostname: str
    unixname: str = ""


class ConclusionNote(Document):
    """The call by which the task ends for Airflow, stored before it is passed on: whoever finds it can pass it on again."""

    path: str
    body: str
    api_version: str = ""
    """What the task's client wrote in ``API_VERSION``."""


class HeartbeatNote(Document):
    """Written while the task sends heartbeats and the server takes none: ``count`` changes, that is all that it says."""

    incarnation: int
    count: int


@dataclass(frozen=True)
class Ties:
    """What the relay needs of the incarnation that it serves."""

    incarnation: int
    load: Callable[[str], bytes | None]
    """A note of the worker's, by name. Raises SavedWorkerError."""
    keep: Callable[[str, bytes], None]
    drop: Callable[[Sequence[str]], None]
    """Delete notes. Raises SavedWorkerError."""
    holds: Callable[[], bool]
    """Whether the lease is proven at this moment."""
    conclude: Callable[[str], bool]
    """Write the outcome to the record. False when this incarnation may not say it any more. Raises Fenced."""


class AirflowRelay:
    """The relay of one incarnation. ``address`` is for tests."""

    def __init__(
        self, spec: RelaySpec, ties: Ties, address: tuple[str, int], only: str | None = None
    ) -> None:
        self._spec = spec
        self._ties = ties
        self._upstream = Upstream(spec.upstream, spec.authorities)
        self._tokens = Tokens(lambda: ties.load(TOKEN))
        self.gate = Gate()
        self._listener = listen(address)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._limits = Limits(body=MAX_BODY, patience=None, reuse=True, only=only)
        self._server: WebServer | None = None
        self._identity = self._read(IDENTITY, Identity)
        self._journal = tapes.Journal(Notes(JOURNAL, self._read, self._keep_of_tape, self._drop_of_tape))
        self._unheard = 0
        self._speaking = threading.Lock()
        """Held for a heartbeat of our own: none is under way when the task has told how it ends."""
        self._waiting: dict[Pass, float] = {}
        """Calls that are being passed on, and since when: the task sends no heartbeat meanwhile."""
        self._told_unheard = float("-inf")
        self.concluded = False

    # What the incarnation calls -------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve, and send heartbeats whenever the task cannot."""
        self._server = WebServer(self._listener, self, "relay", self._limits)
        threading.Thread(target=self._keep_alive, name="relay-heartbeat", daemon=True).start()

    def restored(self, number: str | None) -> None:
        """The worker is about to go on from checkpoint ``number``, or to begin from nothing."""
        self._journal.restored(number)
        if self._journal.repeats:
            log.info(
                "%d calls since checkpoint %s may come again: those that do are answered here",
                self._journal.repeats,
                number,
            )

    def hold(self, number: str) -> None:
        """Before the freeze for checkpoint ``number``: no call is begun, and those under way come to their end."""
        if not self.gate.hold(DRAIN):
            log.warning("a call is still under way: the task may make it again after a restore")
        self._journal.mark(number)

    def release(self) -> None:
        """The worker runs on."""
        self._journal.failed()
        self.gate.release()

    def thawed(self) -> None:
        """The worker runs on while the rest of its checkpoint is stored."""
        self.gate.release()

    def committed(self, number: str, kept: set[str]) -> None:
        """Checkpoint ``number`` is complete, ``kept`` are the others that are still kept."""
        self._journal.committed(number, kept)

    def stop(self) -> None:
        """Refuse everything from now on."""
        self.gate.close()
        if self._server is not None:
            self._server.close()
        self._listener.close()
        if self._server is not None:
            self._server.break_connections()

    # What the worker asks -------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        """Answer one request of the task. No freeze comes before the answer is sent. Raises NoAnswer: it is to ask elsewhere."""
        with ExitStack() as inside:
            way = inside.enter_context(Pass(self.gate))
            try:
                answer = self._answer(way, request.method, request.path, request.headers, request.body)
            except (Shut, Fenced) as error:
                raise NoAnswer(str(error)) from error
            return replace(answer, afterwards=inside.pop_all().close)

    def _answer(self, way: Pass, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if not path.startswith(PATH + "/") or "/../" in path:
            return _problem(404, "only the Execution API is reached through this relay")
        path = path.removeprefix(PATH)
        match = _TASK.fullmatch(path.partition("?")[0])
        call = match[2] if match else ""
        if match and match[1] != self._spec.task:
            return _problem(403, f"this worker is task instance {self._spec.task}")
        if call == "heartbeat":
            return self._heartbeat(way, path, headers, body)
        if call == "run":
            return self._run(way, path, headers, body)
        if call == "state":
            return self._state(way, path, headers, body)
        if method in _EFFECT:
            return self._effect(way, method, path, headers, body)
        if path.startswith(_LIVE):
            return self._forward(way, method, path, headers, body)
        return self._read_only(way, method, path, headers, body)

    def _effect(self, way: Pass, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """A call that may come again after a loss: then it is recognised."""
        name = tapes.digest(method, path, body)
        way.enter()
        known = self._journal.repeated(name)
        before = None if known is None or known.body is None else known
        if before is not None and path.startswith(_ONCE):
            return _recorded(before, method, path)
        self._journal.settle()
        answer = self._forward(way, method, path, headers, body)
        if before is not None and answer.status in _DONE_ALREADY:
            return _recorded(before, method, path)
        content = answer.body if answer.status < 300 else None
        self._journal.note(name, answer.status, _type(answer), content, again=known is not None)
        return answer

    def _read_only(
        self, way: Pass, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        """A call without an effect. After a loss the task reads what it read then, whatever it has written since."""
        name = tapes.digest(method, path, body)
        way.enter()
        known = self._journal.reread(name)
        if known is not None and known.body is not None:
            return _recorded(known, method, path)
        answer = self._forward(way, method, path, headers, body)
        if known is None and answer.status < 500 and answer.status not in _NO_ANSWER:
            extent = answer.headers.get(_RANGE, "")
            self._journal.note_read(name, answer.status, _type(answer), extent, answer.body)
        return answer

    def _run(self, way: Pass, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The task begins. One that begins again, from nothing, is to Airflow the one that it knows already."""
        told = _object(body)
        if self._identity is not None:
            told |= self._identity.model_dump(include={"pid", "hostname", "unixname"})
            body = json.dumps(told).encode()
        answer = self._forward(way, "PATCH", path, headers, body)
        if answer.status == 200 and self._identity is None:
            try:
                self._identity = Identity(
                    pid=told["pid"], hostname=told["hostname"], unixname=told.get("unixname", "")
                )
            except (KeyError, ValidationError) as error:
                log.warning("the task does not say who it is: %s", error)
            else:
                self._patiently(lambda: self._ties.keep(IDENTITY, _dump(self._identity)))
        return answer

    def _state(self, way: Pass, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The task says how it ends: that goes to the record first, and is then passed on for as long as it takes."""
        outcome = str(_object(body).get("state", "unknown"))[:100]
        version = headers.get(API_VERSION, "")
        note = _dump(ConclusionNote(path=path, body=body.decode("utf-8", "replace"), api_version=version))
        way.enter()
        self._patiently(lambda: self._ties.keep(CONCLUSION, note))
        if not self._ties.conclude(outcome):
            raise Shut("this incarnation may not say how the task ends")
        with self._speaking:
            self.concluded = True
        return self._forward(way, "PATCH", path, headers, body)

    def _heartbeat(self, way: Pass, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Passed on under the identity that Airflow knows. A server that is away is no reason to end the task."""
        way.enter()
        if not self._ties.holds():
            way.leave()
            self._wait_for_lease()
            way.enter()
        answer = self._beat(path, headers, self._as_known(body))
        if answer is not None:
            return answer
        self._tell_unheard()
        return Answer(204)

    def _as_known(self, body: bytes) -> bytes:
        if self._identity is None:
            return body
        return json.dumps(self._identity.model_dump(include={"pid", "hostname"})).encode()

    def _beat(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer | None:
        """One heartbeat; None when the server gave no answer that says anything about the task."""
        token = self._tokens.best()
        try:
            answer = self._upstream.send("PUT", path, headers, body, token, HEARTBEAT_TIMEOUT)
        except (OSError, http.client.HTTPException) as error:
            log.warning("the engine does not answer a heartbeat: %s", error)
            return None
        self._learn(answer)
        if answer.status in (401, 403):
            self._tokens.fresher_than(token)
            return None
        return None if answer.status >= 500 or answer.status == 429 else _stripped(answer)

    def _forward(self, way: Pass, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Pass a call on, again and again while the server is away; inside the gate when it returns. Raises Shut."""
        self._waiting[way] = time.monotonic()
        try:
            return self._pass_on(way, method, path, headers, body)
        finally:
            del self._waiting[way]

    def _pass_on(self, way: Pass, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        pause = _RETRY_FIRST
        while True:
            self._wait_for_lease()
            way.enter()
            token = self._tokens.best()
            try:
                answer = self._upstream.send(method, path, headers, body, token, CALL_TIMEOUT)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                self._learn(answer)
                refused = answer.status in (401, 403) and self._tokens.fresher_than(token)
                if not refused and answer.status not in _AGAIN:
                    return _stripped(answer)
                problem = f"status {answer.status}"
            way.leave()
            self._tell_unheard()
            log.warning("%s %s waits for the engine: %s", method, path.partition("?")[0], problem)
            if self.gate.wait_shut(pause):
                raise Shut("the relay of this incarnation is closed")
            pause = min(pause * 2, _RETRY_MOST)

    def _wait_for_lease(self) -> None:
        while not self._ties.holds():
            if self.gate.wait_shut(0.1):
                raise Shut("this incarnation has lost its lease")

    def _learn(self, answer: Answer) -> None:
        if token := answer.headers.get("refreshed-api-token"):
            self._tokens.offer(token)

    # What it does by itself -----------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        """Heartbeats for a task that cannot send them: it is held, and so perhaps frozen, or waits for another answer."""
        path = f"/task-instances/{self._spec.task}/heartbeat"
        while not self.gate.wait_shut(HEARTBEAT_EVERY):
            if not self.gate.held and not self._task_waits():
                continue
            with self._speaking:
                if self._identity is None or self.concluded or not self._ties.holds():
                    continue
                answer = self._beat(path, {"Content-Type": "application/json"}, self._as_known(b""))
            if answer is None:
                self._tell_unheard()

    def _task_waits(self) -> bool:
        """Whether a call of the task's has been under way for so long that a heartbeat is due."""
        return any(time.monotonic() - x >= HEARTBEAT_EVERY for x in list(self._waiting.values()))

    def _tell_unheard(self) -> None:
        if time.monotonic() - self._told_unheard < HEARTBEAT_EVERY - 0.5:
            return
        self._told_unheard = time.monotonic()
        self._unheard += 1
        note = HeartbeatNote(incarnation=self._ties.incarnation, count=self._unheard)
        try:
            self._ties.keep(HEARTBEAT, _dump(note))
        except SavedWorkerError as error:
            log.warning("that the task lives cannot be told: %s", error)

    def _keep_of_tape(self, name: str, part: Document) -> bool:
        try:
            self._ties.keep(name, _dump(part))
        except SavedWorkerError as error:
            log.warning("a call could not be noted; after a loss it would be made again: %s", error)
            return False
        return True

    def _drop_of_tape(self, names: Sequence[str]) -> None:
        try:
            self._ties.drop(names)
        except SavedWorkerError as error:
            log.warning("old notes of calls stay: %s", error)

    def _patiently(self, write: Callable[[], None]) -> None:
        """``write``, however long the store is away. Raises Shut."""
        while True:
            try:
                return write()
            except SavedWorkerError as error:
                log.warning("a note waits for the store: %s", error)
            if self.gate.wait_shut(1.0):
                raise Shut("the relay of this incarnation is closed")

    def _read(self, name: str, kind: type[Any]) -> Any:
        """The note; None without one, or if it is damaged. Raises SavedWorkerError when the store cannot be asked."""
        until = time.monotonic() + _STORE_PATIENCE
        while True:
            try:
                return read_twice(partial(self._read_once, name, kind))
            except Temporary as error:
                if time.monotonic() > until:
                    raise
                log.warning("the note %s waits for the store: %s", name, error)
                time.sleep(1.0)
            except Corrupt as error:
                log.warning("the note cannot be used: %s", error)
                return None

    def _read_once(self, name: str, kind: type[Any]) -> Any:
        found = self._ties.load(name)
        try:
            return None if found is None else kind.model_validate_json(found)
        except ValidationError as error:
            raise Corrupt(f"the note {name} is damaged: {error.error_count()} errors") from error


def _recorded(call: Call, method: str, path: str) -> Answer:
    log.info("%s %s is answered as it was before the loss", method, path)
    headers = {"content-type": call.content_type, _RANGE: call.content_range}
    return Answer(call.status, base64.b64decode(call.body or ""), {k: v for k, v in headers.items() if v})


def _type(answer: Answer) -> str:
    return answer.headers.get("content-type", "")


def _dump(document: Document | None) -> bytes:
    return b"" if document is None else document.model_dump_json().encode()


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _problem(status: int, detail: str) -> Answer:
    return Answer(status, json.dumps({"detail": detail}).encode(), {"content-type": "application/json"})


def _stripped(answer: Answer) -> Answer:
    """Without what the task must not have: it would be in its memory, and so in every checkpoint."""
    headers = {k: v for k, v in answer.headers.items() if k not in ("refreshed-api-token", "set-cookie")}
    return replace(answer, headers=headers)
