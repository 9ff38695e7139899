"""SavedWorkerHook: from an Airflow connection (or configuration) to a Client."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

if TYPE_CHECKING:
    from savedworker.controller.client import Client

SECTION = "savedworker"


class SavedWorkerHook(BaseHook):
    """Reaches workers. Precedence: argument, connection, environment (store only), ``[savedworker]``, default.

    :param savedworker_conn_id: a connection of type ``savedworker``; it need not exist.
    :param store: store URL to use instead of the connection's.
    :param fleet: fleet to use instead of the connection's.
    """

    conn_name_attr = "savedworker_conn_id"
    default_conn_name = "savedworker_default"
    conn_type = "savedworker"
    hook_name = "Saved Worker"

    def __init__(
        self,
        savedworker_conn_id: str = default_conn_name,
        store: str | None = None,
        fleet: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.savedworker_conn_id = savedworker_conn_id
        self._store = store
        self._fleet = fleet

    @cached_property
    def _fields(self) -> dict[str, Any]:
        try:
            return dict(self.get_connection(self.savedworker_conn_id).extra_dejson)
        except AirflowNotFoundException:
            return {}

    def _field(self, name: str) -> str:
        return str(self._fields.get(name) or "").strip()

    @property
    def store(self) -> str:
        """The store's URL. Raises AirflowException when none is set anywhere."""
        found = (
            self._store
            or self._field("store")
            or os.environ.get("SAVEDWORKER_STORE", "")
            or conf.get(SECTION, "store", fallback="")
        )
        if not found:
            raise AirflowException(
                f"no store is set. Fix: give the task store=…, set the field Store of the connection "
                f"{self.savedworker_conn_id!r} (type savedworker), SAVEDWORKER_STORE, or [{SECTION}] store"
            )
        return str(found)

    @property
    def fleet(self) -> str:
        """The fleet's name."""
        return str(
            self._fleet or self._field("fleet") or conf.get(SECTION, "fleet", fallback="local") or "local"
        )

    @property
    def key_file(self) -> str:
        """Where the connection says that the keys of the store are; empty when it does not, and the environment decides."""
        return self._field("key_file")

    @property
    def checkpoint_interval(self) -> str | None:
        """The connection's checkpoint interval as it was written there; None if it names none."""
        return self._field("checkpoint_interval") or None

    def get_client(self) -> Client:
        """A Client on the store, the same one every time. Raises Refused for a store or key that cannot be used."""
        return self._client

    @cached_property
    def _client(self) -> Client:
        from savedworker.controller.client import Client
        from savedworker.store.backend import open_store
        from savedworker.store.sealing import sealing_from_environment

        return Client(open_store(self.store, sealing=sealing_from_environment(key_file=self.key_file)))

    def lease_term(self) -> float:
        """Seconds of the lease on this fleet. Raises Refused when there is no such fleet."""
        return self.get_client().controller.fleet(self.fleet).lease_term

    def test_connection(self) -> tuple[bool, str]:
        """Open the store, make sure that it is there, and look for the fleet: (success, message)."""
        from savedworker.model.errors import SavedWorkerError

        try:
            client = self.get_client()
            client.store.ensure()
            client.controller.fleet(self.fleet)
        except (SavedWorkerError, AirflowException) as error:
            return False, str(error)
        return True, f"the store {client.store.url} answers, and the fleet {self.fleet} is installed"
