"""Hosts on this machine: network namespaces with their own address, scratch directory, agent and metadata service.

May import: what fleet may import. ``LocalFleet`` is loaded on first use, so that the host daemon starts without pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savedworker.fleet.local.fleet import HostInfo, LocalFleet

__all__ = ["HostInfo", "LocalFleet"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from savedworker.fleet.local import fleet

        return getattr(fleet, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
