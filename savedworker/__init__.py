"""Saved Worker: tasks that outlive the machine they run on. The engine-neutral core; nothing in here imports Airflow."""

__version__ = "0.1.0"
