"""Shifts the wall clock of every agent that has this folder in PYTHONPATH by the seconds that the file
$SAVEDWORKER_TEST_CLOCK holds, which may change at any time. Monotonic clocks stay as they are, as when somebody sets a clock.
"""

import datetime
import os
import sys
import time
from pathlib import Path

if "agent" in sys.orig_argv and "SAVEDWORKER_TEST_CLOCK" in os.environ:
    _time = time.time
    _datetime = datetime.datetime

    def _shift() -> float:
        try:
            return float(Path(os.environ["SAVEDWORKER_TEST_CLOCK"]).read_text())
        except (OSError, ValueError):
            return 0.0

    class Shifted(_datetime):
        """``datetime`` whose present is another."""

        @classmethod
        def now(cls, tz=None):
            return _datetime.now(tz) + datetime.timedelta(seconds=_shift())

    time.time = lambda: _time() + _shift()
    datetime.datetime = Shifted  # type: ignore[misc]
