"""Two streams, chunk by chunk: what each may see, and what is refused."""

from __future__ import annotations

import pytest
import torch

from marey.batching.visibility import visibility_matrix
from marey.core.errors import UserError
from marey.objectives.chunked_conditioned import ChunkedConditionedObjective, ChunkGeometry, chunk_labels
from marey.objectives.video_program import ProgramSettings
from tests.objectives.latent_cases import (
    CHANNELS,
    SIDE,
    batch_of,
    gradients,
    largest_difference,
    make_model,
    make_sample,
    predictions,
    prepared_of,
)

FRAMES = 7


def samples(count=3, frames=FRAMES, **changes):
    conditions = torch.randn(count, CHANNELS, 1, SIDE, SIDE, dtype=torch.float64)
    return [
        make_sample(i, 1, frames - 1, words=2 + i % 2, condition_latent=conditions[i], **changes) for i in range(count)
    ]


def make_program(*, mode="strict", noise="per_sample", model=None, **changes):
    settings = ProgramSettings(mode=mode, seed=1, noise=noise)
    return ChunkedConditionedObjective(make_model() if model is None else model, settings, **changes)


def test_visibility_is_the_rule_spelled_out():
    size, window, frames = 2, 2, 7
    labels = chunk_labels([ChunkGeometry(size, window, None)], frames)
    seen = visibility_matrix(labels, labels)[0]
    kinds = ["clean"] * (1 + frames) + ["noisy"] * frames
    chunks = [0, *(f // size + 1 for f in range(frames)), *(f // size + 1 for f in range(frames))]
    for q in range(1 + 2 * frames):
        for k in range(1 + 2 * frames):
            if kinds[q] == "noisy":
                may = chunks[k] == chunks[q] if kinds[k] == "noisy" else chunks[k] < chunks[q]
            else:
                may = kinds[k] == "clean" and chunks[k] <= chunks[q]
            assert bool(seen[q, k]) == (may and abs(chunks[q] - chunks[k]) <= window), (q, k)


def test_a_prediction_depends_on_its_own_noisy_chunk_and_on_earlier_clean_ones_alone():
    program = make_program(chunk_sizes=(2, 2), windows=(64, 64))
    batch = batch_of(samples(1), "strict")
    prepared = prepared_of(program, batch)
    before = predictions(program, batch, prepared)
    for position in range(1 + 2 * FRAMES):
        inputs = prepared.inputs.clone()
        inputs[:, :, position] += 1
        after = predictions(program, batch, prepared._replace(inputs=inputs))
        moved = [not torch.equal(before[0, :, f], after[0, :, f]) for f in range(FRAMES)]
        if position > FRAMES:
            chunk = (position - FRAMES - 1) // 2
            expected = [f // 2 == chunk for f in range(FRAMES)]
        elif position == 0:
            expected = [True] * FRAMES
        else:
            expected = [f // 2 > (position - 1) // 2 for f in range(FRAMES)]
        assert moved == expected, position


def test_a_window_hides_what_is_further_away():
    program = make_program(chunk_sizes=(1, 1), windows=(2, 2), model=make_model(depth=1))
    batch = batch_of(samples(1), "strict")
    prepared = prepared_of(program, batch)
    before = predictions(program, batch, prepared)
    inputs = prepared.inputs.clone()
    inputs[:, :, 0] += 1
    after = predictions(program, batch, prepared._replace(inputs=inputs))
    assert [not torch.equal(before[0, :, f], after[0, :, f]) for f in range(4)] == [True, True, False, False]


def test_text_is_read_by_every_chunk_however_small_the_window():
    program = make_program(chunk_sizes=(1, 1), windows=(1, 1), model=make_model(depth=1))
    batch = batch_of(samples(1), "strict")
    prepared = prepared_of(program, batch)
    before = predictions(program, batch, prepared)
    after = predictions(program, batch, prepared, batch.text[0] + 1)
    assert [torch.equal(before[0, :, f], after[0, :, f]) for f in range(FRAMES)] == [False] * FRAMES


def test_streams_stand_at_the_same_positions_and_the_condition_one_before():
    program = make_program()
    prepared = prepared_of(program, batch_of(samples(1, frame_positions=torch.arange(FRAMES) + 5), "strict"))
    assert prepared.positions[0].tolist() == [4, *range(5, 12), *range(5, 12)]
    assert prepared.inputs.shape[2] == 1 + 2 * FRAMES
    assert bool(prepared.supervised.all())


def test_geometry_and_mild_noise_are_drawn_per_sample_in_their_ranges():
    program = make_program()
    base = samples(1)[0]
    many = [
        make_sample(0, 1, FRAMES - 1, words=1, position=i, condition_latent=base.condition_latent) for i in range(300)
    ]
    batch = batch_of(many, "strict")
    drawn = [program.geometry(batch, b) for b in range(300)]
    assert {g.size for g in drawn} == {1, 2, 3, 4}
    assert {g.window for g in drawn} == set(range(4, 65))
    mild = [g.condition_index for g in drawn if g.condition_index is not None]
    assert 0.4 < len(mild) / 300 < 0.6
    assert min(mild) >= 500
    assert max(mild) <= 999
    assert min(mild) < 520
    assert max(mild) > 980
    half = batch_of(many[150:], "strict")
    assert [program.geometry(half, b) for b in range(150)] == drawn[150:]


def test_the_clean_stream_is_clean_or_mildly_noised_as_a_whole():
    batch = batch_of(samples(2), "strict")
    clean = torch.cat((batch.condition, batch.latents), dim=2)
    never = prepared_of(make_program(condition_noise=0.0), batch)
    assert torch.equal(never.inputs[:, :, : 1 + FRAMES], clean)
    assert not bool(never.times[:, : 1 + FRAMES].any())
    always = prepared_of(make_program(condition_noise=1.0), batch)
    times = always.times[:, : 1 + FRAMES]
    middle = 1000 * float(make_program().decoder.schedule.grid()[500])
    assert bool(((times > 0) & (times <= middle)).all())
    assert all(len(row.unique()) == 1 for row in times)
    assert not bool((always.inputs[:, :, : 1 + FRAMES] == clean).any())
    # Its noise is its own: that of the noisy stream would tell the target.
    s = (times / 1000)[:, None, :, None, None]
    noise = (always.inputs[:, :, : 1 + FRAMES] - (1 - s) * clean) / s
    predicted = always.target + batch.latents
    for shift in (0, 1):
        pair = torch.stack((noise[:, :, shift : shift + FRAMES].flatten(), predicted.flatten()))
        assert abs(float(pair.corrcoef()[0, 1])) < 0.2
    assert torch.equal(always.target, never.target)


def test_a_batch_equals_its_samples_alone():
    own = samples(3)
    program = make_program()
    together = program.forward_train_batch(batch_of(own, "strict"), micro_step=0)
    (together.loss * together.elements).backward()
    grads = gradients(program)
    program.zero_grad()
    total = 0.0
    for sample in own:
        alone = program.forward_train_batch(batch_of([sample], "strict"), micro_step=5)
        (alone.loss * alone.elements).backward()
        total += float(alone.total)
    assert total == pytest.approx(float(together.total), rel=1e-12)
    assert largest_difference(grads, gradients(program)) <= 1e-12
    assert together.elements == 3 * FRAMES * CHANNELS * SIDE**2
    assert together.tokens == 3 * (1 + 2 * FRAMES) * 4
    assert together.attention_utilisation == 1


def watch(program, group):
    """Predictions, and gradients of the unnormalised sum with respect to inputs and texts, sample by sample."""
    batch = batch_of(group, "strict")
    prepared = prepared_of(program, batch)
    inputs = prepared.inputs.detach().clone().requires_grad_()
    texts = [sample.text.clone().requires_grad_() for sample in group]
    out = predictions(program, batch, prepared._replace(inputs=inputs), torch.cat(texts))
    program.decoder.total(out, prepared.target, supervised=prepared.supervised, times=prepared.target_times).backward()
    return [(out[b].detach(), inputs.grad[b], texts[b].grad) for b in range(len(group))]


@pytest.mark.parametrize("what", ["video_latents", "condition_latent", "text", "more text", "position"])
def test_a_batch_mate_changes_nothing(what):
    own = samples(3)
    program = make_program()
    changes = {
        "video_latents": {"video_latents": own[1].video_latents * 50},
        "condition_latent": {"condition_latent": own[1].condition_latent + 9},
        "text": {"text": own[1].text * -9},
        "more text": {"text": torch.cat((own[1].text, own[1].text + 1))},
        "position": {"position": 77},  # another chunk size, window and noise
    }[what]
    kept = {"video_latents": own[1].video_latents, "condition_latent": own[1].condition_latent, "text": own[1].text}
    other = make_sample(1, 1, FRAMES - 1, **{**kept, **changes})
    before, after = watch(program, own), watch(program, [own[0], other, own[2]])
    for b in (0, 2):
        for old, new in zip(before[b], after[b], strict=True):
            torch.testing.assert_close(old, new, rtol=0, atol=1e-12 * max(1.0, float(old.abs().max())))
    assert not torch.allclose(before[1][0], after[1][0])


def test_every_frame_of_the_noisy_stream_has_its_own_level_and_is_supervised():
    batch = batch_of(samples(2), "strict")
    prepared = prepared_of(make_program(), batch)
    noisy = prepared.times[:, 1 + FRAMES :]
    assert all(len(row.unique()) == FRAMES for row in noisy)
    assert bool((noisy > 0).all())
    assert torch.equal(prepared.target_times, noisy)
    s = (noisy / 1000)[:, None, :, None, None]
    # (1 - s) x + s e and e - x give x back.
    torch.testing.assert_close(prepared.inputs[:, :, 1 + FRAMES :] - s * prepared.target, batch.latents)
    assert bool(prepared.supervised.all())


def test_validation_belongs_to_the_window_whatever_draw_brought_it():
    program = make_program()
    condition = samples(1)[0].condition_latent
    totals = [
        program.forward_validation_batch(
            batch_of([make_sample(0, 1, FRAMES - 1, words=2, condition_latent=condition, **draw)], "strict")
        ).total.item()
        for draw in ({}, {"epoch": 3}, {"position": 9}, {"repeat": 1})
    ]
    assert totals == [totals[0]] * 4


@pytest.mark.parametrize("mode", ["padded", "bucket", "packed"])
def test_any_other_mode_is_refused_naming_both_keys(mode):
    with pytest.raises(UserError, match=rf"program.name=chunked_conditioned.*data.batching.mode=strict.*{mode}"):
        make_program(mode=mode)


def test_a_missing_condition_frame_and_temporal_patches_are_refused():
    with pytest.raises(UserError, match=r"source/clip0@0 has no condition frame.*LatentAdapter\(condition=True\)"):
        make_program().forward_train_batch(batch_of([make_sample(0, 1, 2, words=1)], "strict"), micro_step=0)
    with pytest.raises(UserError, match="patch_t is 2"):
        make_program(model=make_model(patch_t=2))
