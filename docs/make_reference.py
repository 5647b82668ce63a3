"""Writes docs/configuration.md from the schema and the defaults: ``python docs/make_reference.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from marey.config import compose
from marey.config.schema import EncoderConfig, SourceConfig

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """\
# Configuration of the encoder run

Every key of `marey train` (and `python main.py`), its default in the recipe `walking_tours_vitb`, and what it means.
`marey train --cfg job` prints the resolved values of a command without running it; `marey plan` says what they add up
to.
Unknown keys are refused with the nearest valid one. This page is written by `python docs/make_reference.py`.

Choose a recipe with `recipe=` (walking_tours_vitb, k710_control, consumer_vit_tiny, videomix_vitl, smoke, demo) and
data with `data=` (walking_tours, walking_tours_8, k710_20_percent, videomix, demo, custom): what is typed wins over the
recipe's data. Then override keys: `marey train recipe=smoke data=custom data.train=my.lance`.
"""


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """The section a field holds, if it is one."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def rows(schema: type[BaseModel], defaults: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Table rows of one section, nested sections in place."""
    for name, field in schema.model_fields.items():
        model, value = nested_model(field), defaults.get(name)
        if model is not None and isinstance(value, dict):
            yield from rows(model, value, f"{prefix}{name}.")
        else:
            meaning = (field.description or "").replace("|", "\\|")
            yield f"| `{prefix}{name}` | `{compose.yaml_value(value)}` | {meaning} |"


def page() -> str:
    """The whole page."""
    defaults = compose.compose_container([])
    parts = [HEAD]
    plain = [name for name, value in defaults.items() if not isinstance(value, dict)]
    parts.append("## Top level\n\n| key | default | meaning |\n|---|---|---|")
    for name in plain:
        meaning = EncoderConfig.model_fields[name].description or ""
        parts.append(f"| `{name}` | `{compose.yaml_value(defaults[name])}` | {meaning} |")
    for name, field in EncoderConfig.model_fields.items():
        model = nested_model(field)
        if model is None:
            continue
        parts.append(f"\n## `{name}`\n\n{(model.__doc__ or '').strip()}\n\n| key | default | meaning |\n|---|---|---|")
        parts.extend(rows(model, defaults[name], f"{name}."))
    parts.append(
        "\n## A source of a mixture\n\n"
        "`data.train=[{path: a.lance, clips_per_video: 200}, {path: b.lance, clips_per_video: 50}]`: "
        "each source is drawn in proportion to its clips.\n\n| key | meaning |\n|---|---|"
    )
    for name, field in SourceConfig.model_fields.items():
        parts.append(f"| `{name}` | {field.description or ''} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
