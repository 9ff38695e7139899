"""SavedWorkerTrigger: brings a worker on while its task is deferred, and relays what it says to the task's log.

What ends a worker is a user's act and nothing else. A triggerer may die, freeze, come back and run the same trigger
beside another one; all of that only changes who looks at the worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_savedworker.operators.saved_worker import log_line, mask_values, task_state

if TYPE_CHECKING:
    from airflow_provider_savedworker.follow import Follower
    from savedworker.controller.client import Client

T = TypeVar("T")

STATE_CHECK_EVERY = 20.0
"""Seconds between two questions whether the task still waits.

Airflow itself does not always tell: the trigger of a deferred task that was cleared runs on until the task is scheduled
again, which for a paused DAG is never.
"""
LEAST_DEFERRAL = 10.0
"""Seconds for which a task stays deferred at least.

The scheduler (3.3.2) learns late that the process which deferred has ended. If the task has been resumed by then, it takes
the one for the other, and fails the task ("finished with state success, but the task instance's state attribute is
running"): seen with a worker that ended four seconds after the deferral.
"""
ON_KILL_PATIENCE = 25.0
"""Seconds for which ``on_kill`` waits for the worker's end, within Airflow's own limit (``on_kill_timeout``, 30 s)."""

_threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="savedworker")
"""asyncio's own pool has as few as five threads, and a store that does not answer holds one for half a minute."""


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """``call`` in a thread, with this task's context, so that its log lines go to the right task."""
    run = partial(contextvars.copy_context().run, call, *arguments)
    return await asyncio.get_running_loop().run_in_executor(_threads, run)


class SavedWorkerTrigger(BaseTrigger):
    """Follows ``worker`` in ``store`` until it has ended and nothing of it runs any more.

    ``secrets`` names variables of its environment whose values Airflow knew to be secret when the task began; this
    process, which may never see the connections that they are from, masks them in the task's log. ``key_file`` is where the
    connection says that the store's keys are; without it the environment of this process decides.
    """

    def __init__(
        self,
        worker: str,
        store: str,
        poll_interval: float = 2.0,
        secrets: Sequence[str] = (),
        key_file: str = "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.worker = worker
        self.store = store
        self.poll_interval = poll_interval
        self.secrets = list(secrets)
        self.key_file = key_file
        self.timeout_after: datetime | None = None
        """When the deferral times out; the triggerer sets it."""
        self._state: str | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        return (
            "airflow_provider_savedworker.triggers.saved_worker.SavedWorkerTrigger",
            {
                "worker": self.worker,
                "store": self.store,
                "poll_interval": self.poll_interval,
                "secrets": self.secrets,
                "key_file": self.key_file,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the worker; one event at its end. Trouble on the way is logged and never ends the trigger."""
        follower = await in_thread(self._follower)
        began = checked = time.monotonic()
        while True:
            if (await in_thread(follower.step)).done:
                await asyncio.sleep(max(0.0, began + LEAST_DEFERRAL - time.monotonic()))
                yield TriggerEvent({"worker": self.worker, "store": self.store})  # type: ignore[no-untyped-call]
                return
            if time.monotonic() - checked >= STATE_CHECK_EVERY:
                checked = time.monotonic()
                if not await self._wanted():
                    await self._cancel()
                    break
            await asyncio.sleep(self.poll_interval)
        # No event: nobody waits for it, and Airflow starts a trigger again that ends before it is taken away.
        await asyncio.Event().wait()

    async def cleanup(self) -> None:
        """Nothing: whoever runs this trigger next goes on with the worker."""

    async def on_kill(self) -> None:
        """Cancel the worker, unless the task still waits for it.

        Airflow calls this whenever a trigger is taken from a triggerer that was not told to stop, and so also when this
        triggerer was frozen for a while and another one has the trigger now.
        """
        if not await self._wanted():
            await self._cancel()

    def _follower(self) -> Follower:
        from airflow_provider_savedworker.follow import Follower

        return Follower(
            self._client(),
            self.worker,
            log_line,
            on_spec=lambda spec: mask_values(spec.env, self.secrets),
        )

    def _client(self) -> Client:
        from savedworker.controller.client import Client
        from savedworker.store.backend import open_store
        from savedworker.store.sealing import sealing_from_environment

        return Client(open_store(self.store, sealing=sealing_from_environment(key_file=self.key_file)))

    async def _wanted(self) -> bool:
        """Whether the task is deferred, as far as Airflow's database can be asked; if it cannot: yes.

        In any other state this worker has ended by itself, or its task was cleared, marked, skipped or timed out. (A new
        try that is deferred by now has ended the worker of the one before when it began.)
        """
        if self.task_instance is None:
            return True
        try:
            self._state = await in_thread(task_state, self.task_instance)
        except Exception as error:  # noqa: BLE001 whatever it is, a doubt must not end a healthy worker
            log_line(
                logging.WARNING, "", f"the task's state is not known ({error}): worker {self.worker} goes on"
            )
            return True
        return self._state == "deferred"

    def _why(self, state: str) -> str:
        """Why the task waits no longer. After its timeout it is scheduled as a cleared one is; the triggerer told us the time."""
        timeout = self.timeout_after
        return "TaskDeferralTimeout" if timeout and datetime.now(UTC) >= timeout else f"the task is {state}"

    async def _cancel(self) -> None:
        from airflow_provider_savedworker.follow import cancel

        state = self._state or "cleared"
        log_line(
            logging.INFO, "", f"the task is {state} and waits no longer: worker {self.worker} is cancelled"
        )
        thread = cancel(self._client(), self.worker, f"Airflow: {self._why(state)}")
        await in_thread(thread.join, ON_KILL_PATIENCE)
