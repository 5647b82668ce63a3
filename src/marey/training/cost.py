"""What a step costs, by arithmetic: tokens, matrix-product FLOPs, an estimate of memory. No torch.

A multiply-add counts as two FLOPs. Backward is twice the forward; recomputed chunks add one forward.
"""

from __future__ import annotations

from typing import NamedTuple

from marey.config.schema import EncoderConfig
from marey.config.sizes import SIZES
from marey.core.tokencount import kept_count

ACTIVATIONS_PER_TOKEN_AND_LAYER = 20
"""Vectors of the model's width kept for backward per token and layer: norms, qkv and rotation, attention, MLP."""


class StepCost(NamedTuple):
    """Of one rank's micro-step unless the name says otherwise.

    tokens_*: kept tokens per view, [CLS] not counted. flops: matrix products, forward and backward.
    memory_bytes: weights, gradients, AdamW moments, EMA and activations; an estimate.
    """

    tokens_global: int
    tokens_global_all: int
    tokens_local: int
    tokens_local_all: int
    tokens_per_clip: int
    tokens_per_clip_all: int
    parameters: int
    projector_parameters: int
    flops: float
    memory_bytes: float
    bytes_shipped_per_clip: int


def step_cost(config: EncoderConfig) -> StepCost:
    """The cost of one micro-step on one rank."""
    model, views = config.model, config.augmentation.local_crops_number
    width, depth, _ = SIZES[model.name]
    frames = model.num_frames // model.tubelet_size
    all_global = frames * (model.img_size // model.patch_size) ** 2
    all_local = frames * (config.augmentation.local_size // model.patch_size) ** 2
    kept_global, kept_local = (
        kept_count(n, model.token_drop_rate, mode=model.token_drop_mode, steps=frames) for n in (all_global, all_local)
    )
    patch_values = 3 * model.tubelet_size * model.patch_size**2
    lengths = [kept_global + 1] + [kept_local + 1] * views
    tokens = sum(lengths)

    embed = 2 * patch_values * width * (tokens - len(lengths))
    linear = 24 * width * width * tokens * depth  # qkv 6, output 2, MLP 16
    attention = sum(4 * length * length * width for length in lengths) * depth
    head = 2 * len(lengths) * config.projector.hidden_dim * (width + config.projector.output_dim)
    directions = 2 * len(lengths) * config.projector.output_dim * config.loss.sigreg.kwargs.num_proj
    encoder_clip = embed + linear + attention
    batch = config.loader.batch_size
    micro = config.loader.micro_batch_size or batch
    passes = 3 if micro == batch else 4
    flops = batch * (passes * encoder_clip + 3 * (head + directions))

    parameters = encoder_parameters(config)
    projector = (
        width * config.projector.hidden_dim
        + 3 * config.projector.hidden_dim
        + (config.projector.hidden_dim + 1) * config.projector.output_dim
    )
    value_bytes = 8 if config.trainer.precision in ("64-true", "64", 64) else 4
    activation_bytes = 2 if "16" in str(config.trainer.precision) else value_bytes
    state = (parameters + projector) * 4 * value_bytes + (parameters * value_bytes if config.ema.enabled else 0)
    activations = micro * tokens * depth * width * ACTIVATIONS_PER_TOKEN_AND_LAYER * activation_bytes
    inputs = batch * (tokens - len(lengths)) * patch_values
    statistics = 6 * batch * len(lengths) * config.loss.sigreg.kwargs.num_proj * value_bytes
    return StepCost(
        tokens_global=kept_global,
        tokens_global_all=all_global,
        tokens_local=kept_local,
        tokens_local_all=all_local,
        tokens_per_clip=kept_global + views * kept_local,
        tokens_per_clip_all=all_global + views * all_local,
        parameters=parameters,
        projector_parameters=projector,
        flops=float(flops),
        memory_bytes=float(state + activations + inputs + statistics),
        bytes_shipped_per_clip=(tokens - len(lengths)) * (patch_values + 3 * 8),
    )


def encoder_parameters(config: EncoderConfig) -> int:
    """Parameters of the encoder: patch embedding, ``[CLS]``, blocks, final norm."""
    width, depth, _ = SIZES[config.model.name]
    patch_values = 3 * config.model.tubelet_size * config.model.patch_size**2
    block = 12 * width * width + 13 * width  # four matrices, their biases, two norms
    return patch_values * width + width + width + depth * block + 2 * width
