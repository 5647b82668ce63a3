"""Token budget, text dropout, validation, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from marey.core.errors import UserError
from marey.objectives.video_text import dropped_texts
from tests.objectives.latent_cases import (
    SIDE,
    TEXT_CHANNELS,
    batch_of,
    largest_difference,
    make_model,
    make_objective,
    make_sample,
    make_samples,
    predictions,
    prepared_of,
    step,
)

BLANK = torch.full((2, TEXT_CHANNELS), 0.5, dtype=torch.float64)
TOKENS_PER_FRAME = (SIDE // 2) ** 2


@pytest.mark.parametrize("noise", ["collated", "per_sample"])
@pytest.mark.parametrize("normalize_over", ["microbatch", "step"])
def test_a_token_budget_changes_neither_loss_nor_gradient(noise, normalize_over):
    from marey.objectives.video_decoder import VideoDecoder

    settings = {"noise": noise, "decoder": VideoDecoder(normalize_over=normalize_over)}
    batch = batch_of(make_samples(6))
    whole, grads = step(make_objective("packed", **settings), batch)
    for frames in (8, 12, 20):
        program = make_objective("packed", **settings, max_tokens=frames * TOKENS_PER_FRAME)
        rows: list[int] = []
        program.model.patch_embed.register_forward_hook(lambda _, inputs, __, rows=rows: rows.append(len(inputs[0])))
        output, cut = step(program, batch)
        assert output.loss.item() == pytest.approx(whole.loss.item(), rel=1e-13)
        assert largest_difference(grads, cut) <= 1e-12
        assert max(rows) <= frames * TOKENS_PER_FRAME
        calls = len(rows) // 2  # each is made again in the backward pass
        assert calls >= math.ceil(sum(batch.lengths) / frames)
        assert sum(rows) == 2 * sum(batch.lengths) * TOKENS_PER_FRAME
        assert (output.tokens, output.tokens_seen, output.elements) == (whole.tokens, whole.tokens_seen, whole.elements)


def test_a_token_budget_drops_the_same_texts():
    settings = {"text_dropout": 0.5, "blank": BLANK}
    batch = batch_of(make_samples(6))
    assert len(set(dropped_texts(batch, dropout=0.5, seed=3))) == 2
    whole, grads = step(make_objective("packed", **settings), batch)
    cut, cut_grads = step(make_objective("packed", **settings, max_tokens=8 * TOKENS_PER_FRAME), batch)
    assert cut.loss.item() == pytest.approx(whole.loss.item(), rel=1e-13)
    assert largest_difference(grads, cut_grads) <= 1e-12


def test_a_sample_over_the_token_budget_is_refused_by_name_before_any_forward():
    program = make_objective("packed", max_tokens=7 * TOKENS_PER_FRAME)
    program.model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(UserError, match=r"source/clip1@0 alone has 32 video tokens.*max_tokens=28"):
        program.forward_train_batch(batch_of(make_samples(3)), micro_step=0)


def test_dropped_texts_are_replaced_by_the_blank_and_by_nothing_else():
    samples = make_samples(4)
    always = make_objective("packed", text_dropout=0.999999, blank=BLANK)
    batch = batch_of(samples)
    dropped = always.forward_train_batch(batch, micro_step=0)
    blanks = [make_sample(i, s.prefix_frames, s.future_frames, text=BLANK) for i, s in enumerate(samples)]
    expected = make_objective("packed").forward_train_batch(batch_of(blanks), micro_step=0)
    assert dropped.loss.item() == pytest.approx(expected.loss.item(), rel=1e-13)
    kept = make_objective("packed").forward_train_batch(batch, micro_step=0)
    assert abs(kept.loss.item() / dropped.loss.item() - 1) > 1e-6


def test_text_dropout_has_its_rate_and_ignores_batch_mates():
    samples = [make_sample(0, 1, 1, words=1, position=i) for i in range(400)]
    flags = dropped_texts(batch_of(samples), dropout=0.3, seed=5)
    assert 0.2 < sum(flags) / 400 < 0.4
    assert dropped_texts(batch_of(samples[200:]), dropout=0.3, seed=5) == flags[200:]
    assert dropped_texts(batch_of(samples), dropout=0.3, seed=6) != flags
    assert not any(dropped_texts(batch_of(samples), dropout=0.0, seed=5))


@pytest.mark.parametrize("visibility", ["full", "prefix_causal"])
def test_validation_depends_on_neither_mode_nor_partition_nor_epoch(visibility):
    samples = make_samples(4)
    later = make_samples(4)
    later = [make_sample(i, s.prefix_frames, s.future_frames, text=s.text, epoch=3) for i, s in enumerate(later)]
    totals, elements = [], []
    for mode, group in (("padded", samples), ("packed", later)):
        program = make_objective(mode, text_dropout=0.9, blank=BLANK, visibility=visibility)
        output = program.forward_validation_batch(batch_of(group, mode))
        totals.append(float(output.total))
        elements.append(output.elements)
    alone = make_objective("strict", visibility=visibility)
    singles = [alone.forward_validation_batch(batch_of([s], "strict")) for s in samples]
    totals.append(sum(float(s.total) for s in singles))
    elements.append(sum(s.elements for s in singles))
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-12)
    assert len(set(elements)) == 1


def test_prefix_is_clean_padding_is_empty_and_only_the_future_is_supervised():
    batch = batch_of(make_samples(4), multiple=3)
    prepared = prepared_of(make_objective("padded"), batch)
    assert batch.capacity == 9
    for b, (prefix, frames) in enumerate(zip(batch.prefixes, batch.lengths, strict=True)):
        assert torch.equal(prepared.inputs[b, :, :prefix], batch.latents[b, :, :prefix])
        assert bool((prepared.times[b, :prefix] == 0).all())
        assert bool((prepared.times[b, prefix:frames] > 0).all())
        assert len(prepared.times[b, prefix:frames].unique()) == frames - prefix
        assert not bool((prepared.inputs[b, :, prefix:frames] == batch.latents[b, :, prefix:frames]).any())
        for field in (prepared.inputs[b, :, frames:], prepared.times[b, frames:], prepared.target[b, :, frames:]):
            assert not bool(field.any())
        assert prepared.supervised[b].tolist() == [prefix <= t < frames for t in range(9)]


def test_output_reports_tokens_padding_and_attention_pairs():
    batch = batch_of(make_samples(4))
    frames = sum(batch.lengths)
    padded = make_objective("padded").forward_train_batch(batch, micro_step=0)
    packed = make_objective("packed").forward_train_batch(batch, micro_step=0)
    assert padded.tokens == packed.tokens == packed.tokens_seen == frames * TOKENS_PER_FRAME
    assert padded.tokens_seen == 4 * 8 * TOKENS_PER_FRAME
    pairs = sum((n * TOKENS_PER_FRAME) ** 2 for n in batch.lengths)
    assert packed.pairs == packed.pairs_seen == padded.pairs == pairs
    assert padded.pairs_seen == 4 * (8 * TOKENS_PER_FRAME) ** 2
    assert packed.attention_utilisation == 1
    assert packed.parts["flow"].item() == pytest.approx(packed.loss.item())


def refusals():
    text = make_model()
    silent = make_model(text=False)
    two = make_model(patch_t=2)
    with_text, without = batch_of(make_samples(2)), batch_of(make_samples(2, text=False))
    run = "forward_train_batch"
    return {
        "packed, patch_t 2": (lambda: make_objective("packed", model=two), r"packed needs.*patch_t is 2"),
        "budget, padded": (lambda: make_objective("padded", max_tokens=99), r"max_tokens=99 .*mode is padded"),
        "dropout, no blank": (lambda: make_objective("packed", text_dropout=0.1), r"blank embedding, which does not"),
        "dropout, no text": (
            lambda: make_objective("packed", model=silent, text_dropout=0.1, blank=BLANK),
            r"no text to drop",
        ),
        "blank of another width": (
            lambda: make_objective("packed", blank=torch.zeros(1, 9)),
            r"blank embedding has 9 channels and the model reads 5",
        ),
        "text missing": (
            lambda: getattr(make_objective("packed", model=text), run)(without, micro_step=0),
            r"source/clip0@0 has no text and the model is conditioned",
        ),
        "text unread": (
            lambda: getattr(make_objective("packed", model=silent), run)(with_text, micro_step=0),
            r"source/clip0@0 has a text and the model has no cross-attention",
        ),
        "channels": (
            lambda: getattr(make_objective("packed", model=make_model(channels=7)), run)(with_text, micro_step=0),
            r"source/clip0@0 has latents of 3 channels and the model reads 7: encode all sources with one codec",
        ),
        "alignment, patch_t 2": (
            lambda: getattr(make_objective("padded", model=two), run)(
                batch_of([make_sample(0, 2, 2, words=1)], "padded", 5), micro_step=0
            ),
            r"padded to 5 frames cannot be cut into temporal patches of 2.*pad_to_multiple_of as a multiple of 2",
        ),
        "odd geometry, patch_t 2": (
            lambda: getattr(make_objective("padded", model=two), run)(with_text, micro_step=0),
            r"source/clip0@0 has 1 prefix and 3 future frames.*patches of 2",
        ),
        "canvas and patch": (
            lambda: getattr(make_objective("padded", model=make_model(patch=3)), run)(with_text, micro_step=0),
            r"canvas of 4 x 4 cannot be cut into patches of 3 x 3",
        ),
        "odd head": (lambda: make_model(width=15, heads=3), r"even number of channels per head"),
    }


@pytest.mark.parametrize("name", list(refusals()))
def test_contradictions_are_refused_in_one_sentence(name):
    act, message = refusals()[name]
    with pytest.raises(UserError, match=message) as refused:
        act()
    assert "\n" not in str(refused.value)


def test_a_mode_s_predictions_have_the_shape_of_the_batch():
    batch = batch_of(make_samples(3), multiple=5)
    program = make_objective("packed")
    assert predictions(program, batch, prepared_of(program, batch)).shape == batch.latents.shape
