"""Binds the services of one worker and leads their fixed addresses to them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from savedworker.checkpoint.network import GATEWAY, Endpoint, PrivateNetwork, Redirect
from savedworker.model.errors import Fatal

log = logging.getLogger(__name__)

_PREFERRED = 20000
"""Added to a service's inner port: the port tried first on the instance's end of the link.

The same one after a restart of the agent, since the kernel keeps translating what is under way to the port it knows.
"""


class Service(Protocol):
    """One service. It has nothing to do with the network but the listeners that it is given."""

    name: str
    endpoint: Endpoint

    def serve(self, listeners: Mapping[str, socket.socket]) -> None:
        """Answer on the sockets of ``listeners`` (by protocol, ``tcp`` or ``udp``), in threads of its own; returns at once."""
        ...

    def close(self) -> None:
        """Stop answering. The service may be given other listeners afterwards."""
        ...


class InnerServices:
    """The services of one worker. ``open`` and ``close`` may be called again and again, from one thread."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = tuple(services)
        self._listeners: list[socket.socket] = []

    def open(self, network: PrivateNetwork | None) -> None:
        """Serve in ``network``, which must be there (None: the worker has no network of its own, nothing to do). Raises Fatal."""
        self.close()
        if network is None or not self._services:
            return
        rules: list[Redirect] = []
        name = ""
        try:
            for service in self._services:
                name = service.name
                bound = _bind(service.endpoint)
                self._listeners += bound.values()
                for protocol, listener in bound.items():
                    rules.append(Redirect(service.endpoint, protocol, listener.getsockname()[1]))
                service.serve(bound)
            network.redirect(rules)
        except OSError as error:
            self.close()
            raise Fatal(
                f"the worker's {name} cannot be served at {GATEWAY}: {error.strerror or error}",
                "see what listens there, or use --network host",
            ) from error
        except Fatal:
            self.close()
            raise

    def close(self) -> None:
        """Stop serving. The network's rules go with the network, or with the next ``open``."""
        for service in self._services:
            service.close()
        for listener in self._listeners:
            listener.close()
        self._listeners = []


def _bind(endpoint: Endpoint) -> dict[str, socket.socket]:
    """Listeners for all protocols of ``endpoint``, on one port of the instance's end of the worker's link. Raises OSError."""
    try:
        return _bind_to(endpoint, _PREFERRED + endpoint.port)
    except OSError:
        return _bind_to(endpoint, 0)


def _bind_to(endpoint: Endpoint, port: int) -> dict[str, socket.socket]:
    bound: dict[str, socket.socket] = {}
    try:
        for protocol in endpoint.protocols:
            kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
            listener = bound[protocol] = socket.socket(socket.AF_INET, kind)
            if protocol == "tcp":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((GATEWAY, port))
            if protocol == "tcp":
                listener.listen(128)
    except OSError:
        for listener in bound.values():
            listener.close()
        raise
    return bound
