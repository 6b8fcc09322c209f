"""``python -m asyncrl.cli``: the command line of this very interpreter."""

from __future__ import annotations

import sys

from .main import main

sys.exit(main())
