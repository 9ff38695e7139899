"""``savedworker agent``: what a fleet starts on an instance. Hidden, because people never type it."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from savedworker.cli.options import json_option, worker_id


@click.command(hidden=True)
@click.option("--store", required=True, metavar="URL")
@click.option("--worker", type=worker_id, help="Default: the instance's tag savedworker:worker.")
@click.option("--launch", metavar="ID", help="Default: the instance's tag savedworker:launch.")
@click.option("--fleet", required=True, metavar="KIND")
@click.option(
    "--instance", metavar="NAME", help="Default: the job's id, or the instance's from its metadata."
)
@click.option("--zone", metavar="NAME", help="Default: from the instance's metadata.")
@click.option("--state-dir", required=True, type=click.Path(path_type=Path))
@click.option("--cgroup-parent", required=True, metavar="PATH")
@click.option("--metadata", metavar="URL")
@click.option("--sigterm-grace", type=float, metavar="SECONDS", help="Time between SIGTERM and SIGKILL here.")
@click.option("--key-from", metavar="ARN", help="SSM parameter or secret that holds the store's key.")
@click.option(
    "--supervise", is_flag=True, help="Start the agent again when it crashes, and pass SIGTERM on to it."
)
@json_option
def agent(
    store: str,
    worker: str | None,
    launch: str | None,
    fleet: str,
    instance: str | None,
    zone: str | None,
    state_dir: Path,
    cgroup_parent: str,
    metadata: str | None,
    sigterm_grace: float | None,
    key_from: str | None,
    supervise: bool,
    as_json: bool,
) -> int:
    """Run one incarnation of a worker on this instance."""
    if supervise:
        from savedworker.agent import supervisor

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        words = [word for word in sys.argv[1:] if word != "--supervise"]
        return supervisor.supervise([sys.executable, "-m", "savedworker.cli", *words], state_dir)

    from savedworker.agent.config import AgentConfig
    from savedworker.agent.main import run

    kind: str | None = None
    if key_from or not (worker and launch and instance and zone):
        from savedworker.agent import whereabouts
        from savedworker.fleet.aws.metadata import DEFAULT, InstanceMetadata
        from savedworker.fleet.aws.secret import fetch_key
        from savedworker.store.sealing import KEY

        service = InstanceMetadata(metadata or DEFAULT)
        here = whereabouts.find(service, worker, launch, instance, zone)
        worker, launch, instance, zone = here.worker, here.launch, here.instance, here.zone
        kind = here.instance_type
        if key_from:
            os.environ[KEY] = fetch_key(key_from, service)
    config = AgentConfig(
        store=store,
        worker=worker,
        launch=launch,
        fleet=fleet,
        instance=instance,
        zone=zone,
        state_dir=state_dir,
        instance_type=kind,
        cgroup_parent=cgroup_parent,
    )
    if sigterm_grace is not None:
        config = replace(config, sigterm_grace=sigterm_grace)
    return run(replace(config, metadata=metadata) if metadata else config)
