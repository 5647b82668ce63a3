"""The four modes are one computation: equalities between them, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.objectives.latent_cases import (
    GivenDraws,
    batch_of,
    gradients,
    largest_difference,
    make_model,
    make_objective,
    make_sample,
    make_samples,
    predictions,
    prepared_of,
    step,
)

VISIBILITIES = ["full", "prefix_causal"]
BATCHED = ["padded", "bucket", "packed"]


@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("mode", BATCHED)
def test_equal_lengths_give_the_strict_numbers_bit_for_bit(mode, visibility):
    samples = [make_sample(i, 2, 4, words=3) for i in range(3)]
    outputs = {}
    for m in ("strict", mode):
        program = make_objective(m, visibility=visibility)
        batch = batch_of(samples, m)
        output, grads = step(program, batch)
        outputs[m] = (output, grads, predictions(program, batch, prepared_of(program, batch)))
    (a, a_grads, a_out), (b, b_grads, b_out) = outputs.values()
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a_out, b_out)
    assert all(torch.equal(a_grads[name], b_grads[name]) for name in a_grads)
    assert b.padding_share == 0


@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("multiple", [1, 4])
def test_padded_and_packed_agree_on_unequal_lengths(visibility, multiple):
    batch = batch_of(make_samples(6), multiple=multiple)
    assert batch.capacity == 8
    padded, packed = (make_objective(mode, visibility=visibility) for mode in ("padded", "packed"))
    (a, a_grads), (b, b_grads) = step(padded, batch), step(packed, batch)
    assert abs(float(a.loss - b.loss)) <= 1e-12 * abs(float(a.loss))
    assert largest_difference(a_grads, b_grads) <= 1e-12
    mask = batch.frame_mask[:, None, :, None, None]
    left = predictions(padded, batch, prepared_of(padded, batch))
    right = predictions(packed, batch, prepared_of(packed, batch))
    torch.testing.assert_close(left * mask, right, rtol=0, atol=1e-12)
    assert not bool(right.masked_select(~mask).any())
    assert b.padding_share == 0
    assert a.padding_share == pytest.approx(1 - sum(batch.lengths) / (6 * 8))


@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("mode", BATCHED)
def test_a_batch_equals_its_samples_alone_given_the_same_random_tensors(mode, visibility):
    samples = make_samples(5)
    batch = batch_of(samples, mode, multiple=3)
    program = make_objective(mode, visibility=visibility)
    noise = torch.randn(batch.latents.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    index = torch.randint(1000, batch.frame_mask.shape, generator=torch.Generator().manual_seed(2))
    together = program.prepare(batch, GivenDraws(noise, index))
    outputs = predictions(program, batch, together)
    total = program.decoder.total(outputs, together.target, supervised=together.supervised, times=together.target_times)
    total.backward()
    grads = gradients(program)

    alone = make_objective("strict", visibility=visibility, model=program.model)
    alone.zero_grad()
    totals = []
    for b, sample in enumerate(samples):
        single = batch_of([sample], "strict")
        frames = single.capacity
        draws = GivenDraws(noise[b : b + 1, :, :frames], index[b : b + 1, :frames])
        prepared = alone.prepare(single, draws)
        own = predictions(alone, single, prepared)
        torch.testing.assert_close(own[0], outputs[b, :, :frames], rtol=0, atol=1e-12)
        torch.testing.assert_close(prepared.target[0], together.target[b, :, :frames], rtol=0, atol=0)
        totals.append(
            alone.decoder.total(own, prepared.target, supervised=prepared.supervised, times=prepared.target_times)
        )
    torch.stack(totals).sum().backward()
    assert torch.stack(totals).sum().item() == pytest.approx(total.item(), rel=1e-13)
    assert largest_difference(grads, gradients(alone)) <= 1e-12


def test_the_same_seed_alone_does_not_make_a_batch_equal_to_its_samples():
    """Collated noise belongs to the batch: the documentation says so, and per-sample noise is the way out."""
    samples = make_samples(3)
    for noise, equal in (("collated", False), ("per_sample", True)):
        batched = make_objective("packed", noise=noise).forward_train_batch(batch_of(samples), micro_step=0)
        singles = [
            make_objective("strict", noise=noise).forward_train_batch(batch_of([s], "strict"), micro_step=0)
            for s in samples
        ]
        together = float(batched.total.detach())
        assert (sum(float(s.total) for s in singles) == pytest.approx(together, rel=1e-12)) == equal


def test_the_loss_is_one_quotient_over_the_batch_and_not_a_mean_of_means():
    samples = make_samples(4, text=False)
    program = make_objective("padded", model=make_model(text=False))
    batch = batch_of(samples)
    output = program.forward_train_batch(batch, micro_step=0)
    prepared = prepared_of(program, batch)
    predicted = predictions(program, batch, prepared)
    errors, means = [], []
    for b, sample in enumerate(samples):
        for frame in range(sample.prefix_frames, sample.valid_frames):
            errors.append((predicted[b, :, frame] - prepared.target[b, :, frame]).square().flatten())
        own = torch.cat(errors[-sample.future_frames :])
        means.append(own.mean())
    expected = torch.cat(errors).mean()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-13)
    assert abs((torch.stack(means).mean() / expected).item() - 1) > 1e-3
    assert output.elements == torch.cat(errors).numel()


def test_no_parameter_and_no_checkpoint_key_depends_on_the_mode():
    blank = torch.zeros(2, 5, dtype=torch.float64)
    states = [
        make_objective(mode, model=make_model(seed=i), blank=blank).state_dict()
        for i, mode in enumerate(["strict", *BATCHED])
    ]
    shapes = [{key: tuple(value.shape) for key, value in state.items()} for state in states]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(key.startswith("model.") or key == "blank_text" for key in shapes[0])


@pytest.mark.parametrize("mode", BATCHED)
def test_a_checkpoint_of_one_mode_trains_on_in_another(mode):
    first = make_objective("strict")
    second = make_objective(mode, model=make_model(seed=9))
    second.load_state_dict(first.state_dict())
    samples = [make_sample(i, 2, 4, words=3) for i in range(2)]
    (a, a_grads), (b, b_grads) = step(first, batch_of(samples, "strict")), step(second, batch_of(samples, mode))
    assert torch.equal(a.loss, b.loss)
    assert largest_difference(a_grads, b_grads) == 0


@pytest.mark.parametrize("mode", ["strict", *BATCHED])
def test_every_heavy_layer_is_called_once_and_packed_shows_it_no_padding(mode):
    samples = [make_sample(i, 2, 4, words=3) for i in range(4)] if mode == "strict" else make_samples(4)
    batch = batch_of(samples, mode)
    program = make_objective(mode)
    rows: dict[str, list[int]] = {}
    for name, layer in program.named_modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.LayerNorm | torch.nn.RMSNorm):
            layer.register_forward_hook(
                lambda _, inputs, __, name=name: rows.setdefault(name, []).append(len(inputs[0]))
            )
    program.forward_train_batch(batch, micro_step=0)
    assert all(len(calls) == 1 for calls in rows.values())
    frames = sum(batch.lengths) if mode in ("packed", "strict") else len(batch) * batch.capacity
    assert rows["model.blocks.0.attn.qkv"] == [4 * frames]
    assert rows["model.blocks.1.mlp.fc1"] == [4 * frames]
    assert rows["model.blocks.0.modulation"] == [frames]
    assert rows["model.blocks.0.cross.kv"] == [sum(batch.text_lengths)]
    assert len(rows) == sum(
        isinstance(m, torch.nn.Linear | torch.nn.LayerNorm | torch.nn.RMSNorm) for m in program.modules()
    )


@pytest.mark.parametrize("mode", ["strict", "padded"])
def test_temporal_patches_of_two_frames_work_where_they_are_allowed(mode):
    samples = [make_sample(i, 2, 4, words=3) for i in range(2)]
    if mode == "padded":
        samples.append(make_sample(2, 2, 2, words=1))
    program = make_objective(mode, model=make_model(patch_t=2))
    batch = batch_of(samples, mode)
    output, grads = step(program, batch)
    assert torch.isfinite(output.loss)
    assert all(bool(torch.isfinite(g).all()) for g in grads.values())
    times = prepared_of(program, batch).target_times
    assert torch.equal(times[:, 0::2], times[:, 1::2])
    assert bool((times[:, 2:4] > 0).all())


def test_one_step_in_bfloat16_autocast_is_close_to_float32():
    program = make_objective("packed").float()
    samples = [
        make_sample(i, 1, 2, words=2, video_latents=make_sample(i, 1, 2).video_latents.float()) for i in range(2)
    ]
    batch = batch_of(samples, "packed")
    exact = program.forward_train_batch(batch, micro_step=0).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = program.forward_train_batch(batch, micro_step=0).loss
    rough.backward()
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.05)
