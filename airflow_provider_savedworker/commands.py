"""Commands of ``airflow`` for this provider: none. Airflow warns at every command of a provider that has executors and does not say so."""

from __future__ import annotations

from typing import Any


def airflow_commands() -> list[Any]:
    """``savedworker`` is a command of its own."""
    return []
