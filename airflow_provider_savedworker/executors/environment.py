"""The environment of a task's worker: Airflow's configuration without its secrets, and the way to the relay.

A task that runs in LocalExecutor inherits all that the scheduler knows. A worker gets options that somebody set and that Airflow does
not count as sensitive, of the sections that a task has use for. Everything else it asks for by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from savedworker.agent.relay.airflow import INNER_URL

SECTIONS = frozenset(
    {
        "aws",
        "common_io",
        "core",
        "dag_processor",
        "email",
        "hive",
        "kerberos",
        "lineage",
        "logging",
        "metrics",
        "openlineage",
        "operators",
        "sdk",
        "secrets",
        "sensors",
        "sentry",
        "smtp",
        "standard",
        "state_store",
        "traces",
        "workers",
    }
)
"""Of these sections a task is given what was set. A dot in a section's name is ``_``, as in the names of variables."""
OPTIONS = frozenset({"api.base_url"})
"""What a task is given of other sections: links to Airflow's own pages, in XComs and in mails, are made in the task."""
BACKENDS = {
    "secrets.backend": "secrets.backend_kwargs",
    "workers.secrets_backend": "workers.secrets_backend_kwargs",
}
"""A secrets backend, and its options, which Airflow counts as sensitive: it is not given without them."""
KEPT_BACK = frozenset(
    {
        "core.auth_manager",
        "core.execution_api_server_url",
        "core.fernet_key",
        "core.internal_api_secret_key",
        "core.parallelism",
        "core.simple_auth_manager_passwords_file",
        "core.simple_auth_manager_users",
        "core.sql_alchemy_conn",
        "core.test_connection",
        "logging.base_log_folder",
        "logging.remote_base_log_folder",
        "logging.remote_log_conn_id",
        "logging.remote_logging",
    }
)
"""Of no use to a task, or set anew. Logs are carried by the executor."""
_HIDDEN = "< hidden >"
_DEFAULT = ("default", "defaults")
"""How the source of a value ends that nobody set: Airflow's own default, or a provider's."""
PATIENT = 86400
"""Seconds for which the task waits for the relay, which itself waits for an engine that is away; a freeze does not count."""


def airflow_options(config: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """``AIRFLOW__…`` variables for what was set. ``config``: ``conf.as_dict(display_source=True)``, sensitive values hidden.

    A secrets backend whose options are kept back is left out as well: the API server asks it for the task.
    """
    found = {}
    hidden = set()
    for written, options in config.items():
        section = written.replace(".", "_")
        for option, (value, source) in options.items():
            name = f"{section}.{option}"
            if section not in SECTIONS and name not in OPTIONS:
                continue
            if source.endswith(_DEFAULT) or name in KEPT_BACK or value is None:
                continue
            if _HIDDEN in str(value):
                hidden.add(name)
                continue
            if "airflow_provider_savedworker.log" in str(value):
                continue
            if option.endswith(("_cmd", "_secret")) or "password" in option:
                continue
            found[_variable(name)] = str(value)
    for backend, its_options in BACKENDS.items():
        if its_options in hidden:
            found.pop(_variable(backend), None)
    return found


def _variable(name: str) -> str:
    section, _, option = name.partition(".")
    return f"AIRFLOW__{section.upper()}__{option.upper()}"


def worker_environment(
    config: Mapping[str, Mapping[str, Any]], home: str, given: Mapping[str, str], *, as_here: bool
) -> dict[str, str]:
    """The whole environment. ``home``: the worker's AIRFLOW_HOME; ``as_here``: its files are those of this machine."""
    here = {}
    if as_here:
        here = {x: os.environ[x] for x in ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "TZ") if x in os.environ}
    return {
        **here,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **airflow_options(config),
        **given,
        "AIRFLOW_HOME": home,
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": f"{home}/logs",
        "AIRFLOW__LOGGING__REMOTE_LOGGING": "False",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": INNER_URL,
        "AIRFLOW__CORE__HOSTNAME_CALLABLE": "socket.gethostname",
        # The relay answers at once or for good reason late; who is fenced off is ended by the lease, not by a count.
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": str(PATIENT),
        "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": "1000",
    }
