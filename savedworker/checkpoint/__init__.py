"""Freezing, saving and bringing back one process tree below the application: runc, CRIU, the writable layer, networks, preflight.

May import: store and model.
"""
