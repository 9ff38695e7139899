"""Triggers: what follows a worker while its task is deferred."""
