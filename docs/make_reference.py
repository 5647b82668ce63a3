"""Writes the configuration pages from the schemas and the defaults: ``python docs/make_reference.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from marey.config import compose
from marey.config.causal import CausalConfig, LatentSourceConfig
from marey.config.schema import EncoderConfig, SourceConfig

FOLDER = Path(__file__).parent
ENCODER_HEAD = """\
# Configuration of the encoder run

Every key of `marey train` (and `python main.py`), its default in the recipe `walking_tours_vitb`, and what it means.
`marey train --cfg job` prints the resolved values of a command without running it; `marey plan` says what they add up
to. The causal run has [a page of its own](configuration-causal.md).
Unknown keys are refused with the nearest valid one. This page is written by `python docs/make_reference.py`.

Choose a recipe with `recipe=` (walking_tours_vitb, k710_control, consumer_vit_tiny, videomix_vitl, smoke, demo) and
data with `data=` (walking_tours, walking_tours_8, k710_20_percent, videomix, demo, custom): what is typed wins over the
recipe's data. Then override keys: `marey train recipe=smoke data=custom data.train=my.lance`.
"""
ENCODER_SOURCE = """
## A source of a mixture

`data.train=[{path: a.lance, clips_per_video: 200}, {path: b.lance, clips_per_video: 50}]`:
each source is drawn in proportion to its clips.
"""
CAUSAL_HEAD = """\
# Configuration of the causal run

Every key of `marey train --config-name causal_video`, its default, and what it means; [causal.md](causal.md)
says how they act together. Choose geometries up to 64 latent frames with `causal_recipe=long`, data with `data=demo` or
`data.train=MANIFEST`. This page is written by `python docs/make_reference.py`.
"""
CAUSAL_SOURCE = """
## A source of a mixture

`data.sources=[{name: a, manifest: a.csv, weight: 2}, {name: b, manifest: b.csv, weight: 1}]`:
`data.weights` says what a weight counts.
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


def page(head: str, config_name: str, schema: type[BaseModel], source: type[BaseModel], about_source: str) -> str:
    """One objective's page."""
    defaults = compose.compose_container([], config_name=config_name)
    parts = [head, "## Top level\n\n| key | default | meaning |\n|---|---|---|"]
    plain = [name for name, value in defaults.items() if not isinstance(value, dict)]
    for name in plain:
        meaning = schema.model_fields[name].description or ""
        parts.append(f"| `{name}` | `{compose.yaml_value(defaults[name])}` | {meaning} |")
    for name, field in schema.model_fields.items():
        model = nested_model(field)
        if model is None:
            continue
        parts.append(f"\n## `{name}`\n\n{(model.__doc__ or '').strip()}\n\n| key | default | meaning |\n|---|---|---|")
        parts.extend(rows(model, defaults[name], f"{name}."))
    parts.append(f"{about_source}\n| key | meaning |\n|---|---|")
    parts.extend(f"| `{name}` | {field.description or ''} |" for name, field in source.model_fields.items())
    return "\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """What each page should hold."""
    return {
        FOLDER / "configuration.md": page(
            ENCODER_HEAD, compose.DEFAULT_CONFIG, EncoderConfig, SourceConfig, ENCODER_SOURCE
        ),
        FOLDER / "configuration-causal.md": page(
            CAUSAL_HEAD, "causal_video", CausalConfig, LatentSourceConfig, CAUSAL_SOURCE
        ),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
