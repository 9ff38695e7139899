"""``python -m savedworker.cli``: the same as ``savedworker``."""

from savedworker.cli import main

if __name__ == "__main__":
    main()
