"""A run's own records in words: experiment, batch, model, input, data. No torch here."""

from __future__ import annotations

from typing import Any

from marey.config.sizes import SIZES
from marey.evaluation.wording import short


def experiment(config: dict[str, Any]) -> str:
    """The recipe by name and source, and what a run of it may claim."""
    recipe = config.get("recipe") or {}
    name, source, claims = (recipe.get(key) for key in ("name", "source", "claims"))
    if not name:
        return ""
    return f"{name} ({source})" + (f"; it can claim {_unfinished(claims)}" if claims else "")


def _unfinished(claims: str) -> str:
    return claims if claims.startswith("that ") else f"this: {claims}"


def batch_words(
    *, effective: Any, statistic: Any, norm_group: Any, world: Any, reference: dict[str, Any], unit: str = "clips"
) -> str:
    """The three batch numbers and the world size, each beside the recipe's where it differs."""
    named = (
        ("effective", effective, reference.get("effective_batch")),
        ("statistic", statistic, reference.get("statistic_batch")),
        ("BatchNorm group", norm_group, reference.get("norm_group")),
    )
    parts = [
        f"{name} {value:,}" + (f" (recipe: {theirs:,})" if theirs not in (None, value) else "")
        for name, value, theirs in named
        if isinstance(value, int)
    ]
    if isinstance(world, int):
        parts.append(f"world size {world}")
    return f"{unit}: " + ", ".join(parts) if parts else ""


_DROPPED = {"tube": "tubes of tokens"}


def model_words(model: dict[str, Any]) -> str:
    """The encoder's size, what it reads, and how much of it training dropped where that is known."""
    if not model:
        return ""
    if "hidden" in model:
        return _video_model_words(model)
    size = SIZES.get(str(model.get("name")))
    shape = f", width {size.width}, {size.depth} blocks, {size.heads} heads" if size else ""
    dropped = ""
    if model.get("token_drop_rate") is not None:
        unit = _DROPPED.get(str(model.get("token_drop_mode")), "tokens")
        dropped = f", {model['token_drop_rate']:.0%} of {unit} dropped in training"
    return (
        f"{model.get('name')}{shape}, patches of {model.get('tubelet_size')} x {model.get('patch_size')} x "
        f"{model.get('patch_size')}, {model.get('attn_mode')} attention, {model.get('rope_layout')} positions{dropped}"
    )


def known_model(config: dict[str, Any], receipt: dict[str, Any]) -> dict[str, Any]:
    """The configuration's ``model`` without what nobody knows: of imported weights, how they were trained."""
    model = dict(config.get("model") or {})
    if receipt.get("imported"):
        model.pop("token_drop_rate", None)
    return model


def _video_model_words(model: dict[str, Any]) -> str:
    channels = f", {model['channels']} latent channels" if model.get("channels") else ""
    return (
        f"video transformer, width {model.get('hidden')}, {model.get('layers')} blocks, {model.get('heads')} heads, "
        f"patches of {model.get('patch_t')} x {model.get('patch')} x {model.get('patch')} latent cells{channels}"
    )


def program_words(config: dict[str, Any]) -> str:
    """What a causal run sees and predicts, and how its samples share a forward pass; empty for other runs."""
    program, data = config.get("program"), config.get("data") or {}
    if not isinstance(program, dict):
        return ""
    batching = data.get("batching") or {}
    buckets = data.get("buckets") or []
    shown = ", ".join("+".join(map(str, bucket)) for bucket in buckets[:6])
    more = f" and {len(buckets) - 6} more" if buckets[6:] else ""
    text = "without text" if data.get("text_conditioning") == "disabled" else "conditioned on text"
    over = (config.get("loss") or {}).get("normalize_over")
    return (
        f"{program.get('name')}, {text}, given + predicted frames {shown}{more}; "
        f"{_shared(data, batching)}, mode {batching.get('mode')}, loss over the {over}"
    )


def _shared(data: dict[str, Any], batching: dict[str, Any]) -> str:
    """What one microbatch of a rank holds."""
    tokens = batching.get("fill_tokens")
    count = f"{data.get('train_batch_size')} samples" if tokens is None else f"up to {tokens:,} tokens"
    return f"{count} per rank" + (", ranks dealt like work" if batching.get("balance") == "longest_first" else "")


def input_words(preprocessing: dict[str, Any]) -> str:
    """What a clip must be before it enters."""
    if not preprocessing:
        return ""
    if "img_size" not in preprocessing:
        return _latent_words(preprocessing)
    side, rate, stride = (preprocessing.get(key) for key in ("img_size", "rate", "frame_stride"))
    every = "consecutive frames" if stride == 1 else f"one frame in {stride}"
    spaced = f" stored at {short(rate)}/s" if isinstance(rate, int | float) else ""
    resized = str(preprocessing.get("resize")).replace("img_size", str(side))
    return (
        f"{preprocessing.get('num_frames')} x {side} x {side} as [{preprocessing.get('layout')}], {every}{spaced}, "
        f"{resized}, {preprocessing.get('crop')} crop"
    )


def _latent_words(preprocessing: dict[str, Any]) -> str:
    canvas, rate, codec, text = (preprocessing.get(key) for key in ("canvas", "rate", "codec", "text"))
    parts = [f"latents [{preprocessing.get('layout', 'B,C,T,H,W')}] of {preprocessing.get('channels')} channels"]
    if canvas:
        parts.append(f"the first on a canvas of {' x '.join(map(str, canvas))}")
    if isinstance(rate, int | float):
        parts.append(f"{short(rate)} latent frames/s")
    if isinstance(codec, dict):
        parts.append(f"codec {codec.get('fingerprint') or codec.get('name') or 'not recorded'}")
    if isinstance(text, dict):
        parts.append(f"text through {text.get('fingerprint')}")
    return ", ".join(parts)


def data_words(config: dict[str, Any]) -> str:
    """What the data is called and where it was."""
    data = config.get("data") or {}
    train = data.get("train") or data.get("sources")
    if isinstance(train, list):
        sources = [source for source in train if isinstance(source, dict)]
        train = ", ".join(str(source.get("path") or source.get("manifest")) for source in sources)
    return f"{data.get('name')}: {train}" if train else ""
