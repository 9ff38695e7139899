"""The savedworker command. Its verbs call the controller; its views only show what records say.

May import: everything in savedworker.
"""

from savedworker.cli.application import main

__all__ = ["main"]
