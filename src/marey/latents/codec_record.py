"""Which codec made a folder of latents, with its options: what `marey encode` leaves beside the manifest. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.core.files import write_json

FILE = "codec.json"


def record_codec(folder: Path, name: str, options: Mapping[str, Any]) -> None:
    """Write the record. Raises OSError where the disk does not take it."""
    write_json(folder / FILE, {"format": 1, "name": name, "options": dict(options)})


def recorded_codec(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Name and options, None where there is no record. Raises UserError for one that cannot be read."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return str(record["name"]), dict(record["options"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a readable codec record ({error!r}); run `marey encode` again") from error
