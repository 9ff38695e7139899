"""One monitor for each source of reclaim warnings, all yielding the same Notice.

May import: checkpoint, store and model.
"""
