"""Every default of the product, in one place. Durations are seconds, sizes bytes."""

from __future__ import annotations

LEASE_TERM = 60.0
LEASE_TERM_LOCAL = 10.0
LEASE_TERM_LEAST = 1.0
LEASE_RENEWALS_PER_TERM = 4
LEASE_MARGIN = 0.1
"""A taker waits for the term plus this share of it, on its own clock."""

CHECKPOINT_INTERVAL = 300.0
INTERVAL_LEAST = 30.0
INTERVAL_MOST = 1800.0
"""Between which an interval is chosen under ``auto``, which begins with CHECKPOINT_INTERVAL."""
CHECKPOINTS_KEPT = 2
RESTORES_WITHOUT_PROGRESS = 3
WAIT_FOR_CAPACITY = 30 * 60.0
AVOID_RECLAIMED_PLACE = 30 * 60.0
WAIT_PER_CHOICE = 5 * 60.0
"""How long a launch may wait for an instance before the fleet's next choice (a queue, a market) is tried."""
ON_DEMAND_AFTER_LOSSES = 3
LOSSES_WITHIN = 3600.0
"""Losses of spot instances within so many seconds are counted for that."""
ON_DEMAND_AFTER_WAIT = 10 * 60.0
SPARE_FOR = 10 * 60.0
"""How long an instance that was launched at a recommendation to leave waits for the notice that may follow."""
SPARES = 2
"""Most launches at one such recommendation: the second only where the first came to nothing."""
WAIT_FOR_MATCH = 10 * 60.0
ORPHAN_AFTER = 24 * 3600.0
RETENTION = 7 * 24 * 3600.0
COLLECTION_GRACE = 24 * 3600.0
"""What no checkpoint names is kept for so long after it was written: a save that is under way may be about to name it."""
COLLECT_EVERY = 3600.0
"""A controller that runs for itself looks this often whether something of a worker can be deleted."""
REAP_EVERY = 600.0
"""A controller that runs for itself looks this often for instances that no record wants."""
BOOTS_WITHOUT_LEASE = 5
"""Instances in a row that may end without executing the worker although there was nothing to restore."""
BOOT_LIMIT = 15 * 60.0
"""How long an instance may run, the lease being free, before its agent takes it."""
LAUNCH_PATIENCE = 30.0
"""A launch that was just requested may be unknown to its fleet, or wait there, for so long without that meaning anything."""

LAUNCH_RETRY = 5.0
"""First pause after a failed launch; it doubles up to LAUNCH_RETRY_MAX."""
LAUNCH_RETRY_MAX = 120.0
STOP_GRACE = 20.0
"""How long an agent may take to end its own instance after the worker ended, before the controller ends it."""

GRACE_SIGTERM = 25.0
"""Assumed when SIGTERM comes and nothing tells more (Docker's and Kubernetes' defaults are 10 and 30 s)."""
GRACE_EC2 = 120.0
GRACE_GOOGLE = 30.0
GRACE_LOCAL = 30.0
"""What a drill gives unless told otherwise: Google's, the shortest of the clouds'."""
NOTICE = {"local": GRACE_LOCAL, "ec2": GRACE_EC2}
"""Seconds of notice that each fleet gives; others give SIGTERM, and what their settings say of the time after it."""

GHOST_LIMIT = 2 << 30
"""Largest deleted-but-open file that a checkpoint takes (CRIU's ghost-limit), in bytes."""

MEMORY_BUDGET = 1 << 30
MEMORY_BUDGET_LEAST = 256 << 20
"""Of an agent, for checkpoints and restores; with the least it works with one thread."""

MEMORY_LEAST = 8 << 20
CPUS_LEAST = 0.01
"""Limits of a worker below which its container cannot even be made."""

STORE_TIMEOUT = 25.0
"""An unreachable store is reported within this time."""
PREFLIGHT_EVERY = 10.0
LOG_SHIP_EVERY = 1.0
AIRFLOW_CONN_ID = "savedworker_default"
