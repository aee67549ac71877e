"""Makes ``python -m fedproto`` the same as the command ``fedproto``."""

import sys

from fedproto.cli import main

if __name__ == "__main__":
    sys.exit(main())
