"""The model card of an export: what the receipt says, and three lines that reproduce an embedding."""

from __future__ import annotations

from typing import Any

import torch

from marey import __version__
from marey.evaluation.checkpoint_file import weights_hash
from marey.evaluation.describing import batch_words, input_words, known_model, model_words
from marey.evaluation.loading import PREFIX, LoadedEncoder
from marey.evaluation.wording import count, dig

LINES = """\
from safetensors.torch import load_file; from transformers import AutoModel
model, example = AutoModel.from_pretrained("./", trust_remote_code=True), load_file("example.safetensors")
print((model(model.preprocess(example["video"])).pooler_output - example["embedding"]).abs().max().item())
"""
"""Run in the export's folder: the largest difference from the embedding that Marey computed."""

_PLACES = ("checkpoint.", "data.train", "data.val", "resume.", "wandb.")
"""Keys whose values say where things lie, which strangers need not know."""

_CARD = """\
---
library_name: transformers
tags: [video, self-supervised-learning, feature-extraction, marey]
---

# {title}

{lead} It loads without Marey, from the code in this folder.

## Use

```python
{lines}```

Run in this folder, these lines load the encoder and print how far its `[CLS]` output for the clip in
`example.safetensors` is from the one that Marey computed when this folder was written. There, with PyTorch {torch}
on a CPU in float32, all tokens were compared with Marey's: a difference of {difference}.
On the same kind of CPU expect the same; elsewhere rounding, about 1e-5.

`model.preprocess(frames)` takes uint8 RGB frames `[T, 3, H, W]` (or `[B, T, 3, H, W]`), spaced in time as in training,
and does what training did without its augmentation: resize, centre crop, normalise, axes `[B, 3, T, {side}, {side}]`.
Where Pillow is installed, `AutoImageProcessor` loads the same.

`model(...)` gives `last_hidden_state` `[B, 1+N, {width}]`, the `[CLS]` token and then one token per patch, frame by
frame and row by row, and `pooler_output` `[B, {width}]`, the `[CLS]` token. All tokens are after the final LayerNorm.
{seen}

## What it is

| | |
|---|---|
{rows}

{claims}## Files

| file | what it is |
|---|---|
| `model.safetensors` | the encoder's weights, float32 |
| `config.json`, `preprocessor_config.json` | its shape, and what its input must be |
| `modeling_marey.py`, `encoder_marey.py` | the code that runs it (Apache-2.0); `encoder_marey.py` needs PyTorch alone |
| `example.safetensors` | a synthetic clip (`video`, uint8) and the `[CLS]` output that Marey computed (`embedding`) |
| `receipt.json` | the training run's own record, as of this checkpoint |

The license of the weights is not stated here: it is for whoever publishes them to say.
"""


def model_card(loaded: LoadedEncoder, about: dict[str, Any], *, difference: float) -> str:
    """README.md of the export of ``loaded``.

    ``about`` is its checkpoint's ``marey`` entry, ``difference`` the largest between the export's tokens and Marey's.
    """
    config, receipt = loaded.info.config, about.get("receipt") or {}
    recipe = config.get("recipe") or {}
    seen = (
        "A patch sees its own and earlier frames, `[CLS]` sees all: the outputs of a frame do not depend on later ones."
        if loaded.encoder.attn_mode == "block_causal"
        else "Every token sees all others."
    )
    version, imported = about.get("version") or __version__, receipt.get("imported") or {}
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _rows(loaded, about) if value)
    return _CARD.format(
        title=f"{loaded.model.name}, "
        + ("imported weights" if imported else f"{recipe.get('name') or 'unnamed recipe'}, step {loaded.info.step:,}"),
        lead=f"A video encoder that Marey {version} imported from `{imported['file']}` and did not train."
        if imported
        else f"A video encoder pretrained with Marey {version}.",
        lines=LINES,
        torch=torch.__version__,
        difference="0.0: bit for bit the same" if difference == 0 else f"{difference:.1e} at most",
        width=loaded.encoder.embed_dim,
        side=loaded.preprocessing.img_size,
        seen=seen,
        rows=rows,
        claims=_claims(recipe, receipt),
    )


def _rows(loaded: LoadedEncoder, about: dict[str, Any]) -> list[tuple[str, str]]:
    info, receipt, config = loaded.info, about.get("receipt") or {}, loaded.info.config
    recipe = config.get("recipe") or {}
    keys = about.get("keys") or {}
    key = next((name for name in keys if name != "state_dict"), "") if info.weights == "ema" else "state_dict"
    meaning = keys.get(key) or ""
    digest = weights_hash({f"{PREFIX}{name}": value for name, value in loaded.encoder.state_dict().items()})
    seed, share = config.get("seed"), info.starting_share
    code = dig(receipt, "code", "commit")
    # Of imported weights there is no run: neither its length nor its seed is known.
    imported = bool(receipt.get("imported"))
    run = (receipt.get("run_id"), f"seed {seed}", code and f"code {code[:12]}")
    return [
        ("recipe", f"{recipe.get('name')} ({recipe.get('source')})" if recipe.get("name") else ""),
        ("encoder", model_words(known_model(config, receipt))),
        ("input", input_words(about.get("preprocessing") or {})),
        ("data", _data(config, receipt)),
        (
            "trained for",
            "" if imported else f"{count(info.step, 'optimizer step')}, epoch {info.epoch}{_consumed(receipt)}",
        ),
        (
            "batch",
            batch_words(
                effective=about.get("effective_batch"),
                statistic=about.get("statistic_batch"),
                norm_group=about.get("norm_group"),
                world=about.get("world_size"),
                reference=recipe.get("reference") or {},
            ),
        ),
        ("weights", f"{info.weights}: {meaning}" if meaning else info.weights),
        ("beware", f"{share:.0%} of these weights are still where the average started" if share > 0.01 else ""),
        ("weights SHA-256", f"`{digest}` (names, dtypes, shapes and bytes)"),
        ("run", "" if imported else ", ".join(part for part in run if part)),
        ("imported from", _imported(receipt)),
    ]


def _data(config: dict[str, Any], receipt: dict[str, Any]) -> str:
    """Names and sizes, no paths: a card is read by strangers."""
    name = dig(receipt, "data", "name") or dig(config, "data", "name") or ""
    sources = [source for source in dig(receipt, "data", "train") or [] if isinstance(source, dict)]
    sizes = [
        f"{source['name']}: {source['episodes']:,} episodes, {source['frames']:,} frames"
        for source in sources
        if all(source.get(key) is not None for key in ("name", "episodes", "frames"))
    ]
    return f"{name} ({'; '.join(sizes)})" if sizes else str(name)


def _consumed(receipt: dict[str, Any]) -> str:
    consumed = receipt.get("consumed") or {}
    parts = [f"{consumed[key]:,} {key}" for key in ("clips", "tokens") if isinstance(consumed.get(key), int)]
    return f": {', '.join(parts)} consumed" if parts else ""


def _imported(receipt: dict[str, Any]) -> str:
    found = receipt.get("imported") or {}
    return f"{found['file']}, SHA-256 `{found['sha256']}`" if found else ""


def _claims(recipe: dict[str, Any], receipt: dict[str, Any]) -> str:
    """What this run may claim, and where it left its recipe."""
    lines = ["## What it may claim", ""]
    claims, public, hidden = (recipe.get(key) for key in ("claims", "public", "not_public"))
    who = "It can be claimed" if receipt.get("imported") else "A run of this recipe can claim"
    lines.append(f"{who} {_unfinished(claims)}." if claims else "Its recipe states nothing.")
    if public:
        lines.append(f"Public of the recipe's source: {public}. Not public: {hidden or 'nothing that matters here'}.")
    changes = [change for change in receipt.get("differences_from_recipe") or [] if not change.startswith(_PLACES)]
    if changes:
        lines += [
            "",
            "Values that are not the recipe's, places on disk left out:",
            "",
            *(f"- `{change}`" for change in changes),
        ]
    departures = receipt.get("differences_from_published_code") or []
    if departures:
        lines += ["", "Where the program departs from the published code on purpose:", ""]
        lines += [f"- {entry['what']}: {entry['here']} (published: {entry['published']})" for entry in departures]
    return "\n".join(lines) + "\n\n"


def _unfinished(claims: str) -> str:
    text = claims.rstrip(".")
    return text if text.startswith("that ") else f"this: {text}"


def _cell(value: str) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
