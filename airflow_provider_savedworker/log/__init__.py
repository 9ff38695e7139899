"""Logs of tasks in the store: what Airflow's pages show while a worker runs, and for as long as people want to read it."""
