"""What the product costs on this machine, measured: freeze, time to safe, restore, overhead, each beside plain runc in one run.

May import: everything below the command line. ``suite.measure`` runs a plan; ``summary`` makes medians, ratios, JSON and a table of it.
"""
