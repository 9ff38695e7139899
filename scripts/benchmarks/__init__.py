"""Measures what a worker costs and how fast it is saved and restored, against bare processes and plain runc in the same run.

Development only; may import all of savedworker, and nothing imports it.
"""
