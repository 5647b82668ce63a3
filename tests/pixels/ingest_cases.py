"""What the tests of ingest share."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import lance

Rows = list[dict[str, Any]]


def rows_of(store: Path) -> Rows:
    return lance.dataset(str(store)).to_table().to_pylist()  # type: ignore[no-any-return]


def children_of(process: subprocess.Popen[Any]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
