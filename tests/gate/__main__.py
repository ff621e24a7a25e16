"""``python -m gate``."""

import sys

from .table import main

if __name__ == "__main__":
    sys.exit(main())
