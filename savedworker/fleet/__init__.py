"""Adapters that launch, describe and terminate instances, all behind the one Fleet protocol.

May import: notice, checkpoint, store and model.
"""
