"""Operators: what DAG files import. Cheap to import, on every platform."""
