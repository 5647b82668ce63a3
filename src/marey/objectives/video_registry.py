"""From a causal run's configuration to its program."""

from __future__ import annotations

from torch import Tensor

from marey.config.causal import CausalConfig
from marey.models.video_transformer import VideoTransformerSize, build_video_transformer
from marey.objectives.chunked_conditioned import ChunkedConditionedObjective
from marey.objectives.flow import FlowSchedule
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_decoder import VideoDecoder
from marey.objectives.video_program import ProgramSettings, VideoProgram

summary_keys: dict[str, str] = {
    "state_dict": "the weights that training updates (model.*): resume, fine-tune or roll out with these",
    "state_dict_ema": "a slow average of the same weights (model.*), where ema.enabled",
}
"""Checkpoint key -> what it is for, in one sentence."""


def build_causal(
    config: CausalConfig, *, channels: int, text_channels: int | None, blank_text: Tensor | None
) -> VideoProgram:
    """The program that ``config`` names, weights initialised from ``config.seed``.

    ``channels`` are the latent channels of the data; ``text_channels`` those of its text embeddings, None where text
    conditioning is disabled; ``blank_text`` is the embedding ``[L, D]`` of the empty text, needed for text dropout.
    Raises ``UserError`` for choices that contradict each other.
    """
    size = VideoTransformerSize(
        channels=channels,
        width=config.model.hidden,
        depth=config.model.layers,
        heads=config.model.heads,
        patch=config.model.patch,
        patch_t=config.model.patch_t,
        mlp_ratio=config.model.mlp_ratio,
        text_channels=text_channels,
    )
    program = config.program
    settings = ProgramSettings(
        mode=config.data.batching.mode,
        seed=config.seed,
        decoder=VideoDecoder(
            schedule=FlowSchedule(levels=program.levels, shift=program.shift),
            weighting=config.loss.weighting,
            normalize_over=config.loss.normalize_over,
        ),
        noise=config.noise,
        text_dropout=program.text_dropout,
        max_tokens=config.data.batching.max_tokens,
    )
    model = build_video_transformer(size, seed=config.seed)
    if program.name == "chunked_conditioned":
        return ChunkedConditionedObjective(
            model,
            settings,
            chunk_sizes=program.chunk_size,
            windows=program.chunk_window,
            condition_noise=program.condition_noise,
            blank_text=blank_text,
        )
    return PrefixSuffixObjective(model, settings, visibility=program.visibility, blank_text=blank_text)
