"""reconcile(worker): launches, relaunches and finishes workers from their records; and the client calls built on it.

May import: agent and everything below it.
"""
