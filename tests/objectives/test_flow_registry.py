"""From the causal configuration to a program that trains."""

from __future__ import annotations

import pytest
import torch

from marey.config import compose
from marey.config.causal import CausalConfig
from marey.objectives.chunked_conditioned import ChunkedConditionedObjective
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_registry import build_causal
from tests.objectives.latent_cases import CHANNELS, TEXT_CHANNELS, batch_of, make_sample


def config(*overrides: str) -> CausalConfig:
    plain = compose.compose_container(["data.train=unused", *overrides], config_name="causal_video")
    return compose.validate(plain, CausalConfig)


@pytest.mark.parametrize("mode", ["strict", "padded", "bucket", "packed"])
def test_every_mode_builds_and_takes_a_step(mode):
    chosen = config(
        f"data.batching.mode={mode}",
        "program.text_dropout=0.1",
        "data.text_conditioning=task_prompt",
        "noise=per_sample",
        "loss.normalize_over=step",
        "program.visibility=prefix_causal",
        "loss.weighting=logit_bell",
        "model.hidden=24",
        "model.heads=2",
        "seed=4",
    )
    program = build_causal(chosen, channels=CHANNELS, text_channels=TEXT_CHANNELS, blank_text=torch.zeros(1, 5))
    assert isinstance(program, PrefixSuffixObjective)
    assert program.settings.mode == mode
    assert (program.settings.seed, program.settings.noise, program.settings.text_dropout) == (4, "per_sample", 0.1)
    assert program.visibility == "prefix_causal"
    assert (program.decoder.weighting, program.decoder.normalize_over) == ("logit_bell", "step")
    assert program.decoder.schedule.shift == chosen.program.shift == 5
    latents = make_sample(0, 1, 2).video_latents.float()
    batch = batch_of([make_sample(i, 1, 2, words=2, video_latents=latents) for i in range(2)], mode)
    output = program.forward_train_batch(batch, micro_step=0)
    output.loss.backward()
    assert output.loss.item() > 0
    assert not output.divided
    assert bool(program.model.final.proj.weight.grad.any())


def test_levels_and_the_token_budget_reach_the_program():
    chosen = config("data.batching.mode=packed", "data.batching.max_tokens=640", "program.levels=50", "program.shift=2")
    program = build_causal(chosen, channels=CHANNELS, text_channels=None, blank_text=None)
    assert program.settings.max_tokens == 640
    assert (program.decoder.schedule.levels, program.decoder.schedule.shift) == (50, 2)


def test_the_chunked_program_gets_its_ranges():
    chosen = config(
        "program.name=chunked_conditioned",
        "data.batching.mode=strict",
        "program.chunk_size=[2,3]",
        "program.chunk_window=[5,6]",
        "program.condition_noise=0.25",
        "model.hidden=24",
        "model.heads=2",
    )
    program = build_causal(chosen, channels=CHANNELS, text_channels=None, blank_text=None)
    assert isinstance(program, ChunkedConditionedObjective)
    assert (program.chunk_sizes, program.windows, program.condition_noise) == ((2, 3), (5, 6), 0.25)
    assert program.model.size.text_channels is None


def test_the_default_size_is_the_one_the_benchmark_uses():
    program = build_causal(config(), channels=16, text_channels=64, blank_text=None)
    assert 5.0e6 < sum(p.numel() for p in program.parameters()) < 6.5e6
