"""The pure core: specs, records, transitions, decisions and reports as plain functions over frozen models.

Nothing here does I/O or reads a clock, and nothing from the other packages is imported.
"""
