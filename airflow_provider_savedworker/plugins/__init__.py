"""Airflow plugins: what happens in Airflow's own processes rather than in a task or a trigger."""
