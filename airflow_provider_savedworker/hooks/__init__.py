"""Hooks: how to reach the store and the fleet that a connection names."""
