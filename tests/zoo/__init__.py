"""What people run, each as one small program that checks itself: it survives three moves in a row, or is refused by name.

``zoo.py`` is the table, ``programs/`` the animals, ``compatibility.py`` writes docs/compatibility.md from a run of all.
"""
