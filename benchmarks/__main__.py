"""``python -m benchmarks``: see ``runner.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the scripts find each other the same way

from runner import main

if __name__ == "__main__":
    sys.exit(main())
