"""``python -m asyncrl``: the command line of this very interpreter."""

from __future__ import annotations

import sys

from asyncrl.cli.main import main

sys.exit(main())
