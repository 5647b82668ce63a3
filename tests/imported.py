"""Which modules a command has imported by its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from pathlib import Path
from marey import cli
out, *words = sys.argv[1:]
try:
    cli.main(words)
finally:
    Path(out).write_text(json.dumps(sorted(sys.modules)))
"""


def imported_by(folder: Path, *words: str) -> tuple[set[str], str]:
    """Modules, and what was printed, of ``marey`` with ``words``, which must end well. Notes go to ``folder``."""
    out = folder / "imported.json"
    command = [sys.executable, "-c", SCRIPT, str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return set(json.loads(out.read_text())), done.stdout
