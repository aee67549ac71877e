"""``python -m paper ...`` is ``fedproto reproduce ...``."""

from __future__ import annotations

import sys

from fedproto.cli import main

sys.exit(main(["reproduce", *sys.argv[1:]]))
