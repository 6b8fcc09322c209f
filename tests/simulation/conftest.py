"""Makes ``schedules`` importable for the tests beside it; benchmarks/simulate.py does the same."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
