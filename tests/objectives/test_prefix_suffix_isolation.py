"""Nothing of one sample reaches another: perturb one, watch the others."""

from __future__ import annotations

import pytest
import torch

from tests.objectives.latent_cases import (
    TEXT_CHANNELS,
    batch_of,
    make_objective,
    make_sample,
    make_samples,
    prepared_of,
)

MODES = ["padded", "bucket", "packed"]
VICTIM = 4


def watch(program, samples):
    """Predictions of every sample, and gradients of the unnormalised sum with respect to its own tensors.

    Noise is keyed per sample, so the random tensors of the others do not move when one changes.
    """
    batch = batch_of(samples, program.settings.mode)
    prepared = prepared_of(program, batch)
    inputs = prepared.inputs.detach().clone().requires_grad_()
    texts = [sample.text.clone().requires_grad_() for sample in samples]
    prepared = prepared._replace(inputs=inputs)
    layout = program.lay_out(prepared, batch.text_lengths)
    out = program.predict(prepared, layout, torch.cat(texts))
    total = program.decoder.total(out, prepared.target, supervised=prepared.supervised, times=prepared.target_times)
    total.backward()
    return [
        (out[b, :, :frames].detach(), inputs.grad[b, :, :frames], texts[b].grad)
        for b, frames in enumerate(batch.lengths)
    ]


def replaced(samples, **changes):
    old = samples[VICTIM]
    fields = {
        name: getattr(old, name)
        for name in ("video_latents", "frame_positions", "identity", "length_hint", "text", "position")
    }
    fields |= changes
    frames = fields["video_latents"].shape[1]
    prefix = min(old.prefix_frames, frames - 1)
    fields["frame_positions"] = torch.arange(frames)
    new = make_sample(VICTIM, prefix, frames - prefix, **fields)
    return [new if b == VICTIM else sample for b, sample in enumerate(samples)]


def perturbations(samples):
    old = samples[VICTIM]
    longer = make_sample(91, 4, 9).video_latents
    return {
        "values": (True, {"video_latents": old.video_latents * 1e3 + 5}),
        "length, longer": (False, {"video_latents": longer}),
        "length, shorter": (False, {"video_latents": old.video_latents[:, :2]}),
        "text": (True, {"text": old.text * -100 + 7}),
        "text length, longer": (False, {"text": torch.ones(9, TEXT_CHANNELS, dtype=torch.float64)}),
        "text length, shorter": (False, {"text": old.text[:1] * 3}),
    }


@pytest.mark.parametrize("visibility", ["full", "prefix_causal"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(perturbations(make_samples(5))))
def test_a_batch_mate_changes_nothing(mode, name, visibility):
    program = make_objective(mode, noise="per_sample", visibility=visibility)
    samples = make_samples(5)
    same_layout, changes = perturbations(samples)[name]
    before, after = watch(program, samples), watch(program, replaced(samples, **changes))
    for b in range(5):
        for old, new in zip(before[b], after[b], strict=True):
            if b == VICTIM:
                assert old.shape != new.shape or not torch.allclose(old, new)
            elif same_layout:
                assert torch.equal(old, new)
            else:
                torch.testing.assert_close(old, new, rtol=0, atol=1e-12 * max(1.0, float(old.abs().max())))


@pytest.mark.parametrize("visibility", ["full", "prefix_causal"])
@pytest.mark.parametrize("name", ["values", "text", "text length, longer", "text length, shorter"])
def test_a_batch_mate_in_strict_mode_changes_nothing(name, visibility):
    program = make_objective("strict", noise="per_sample", visibility=visibility)
    samples = [make_sample(i, 2, 4, words=i + 1) for i in range(5)]
    same_layout, changes = perturbations(samples)[name]
    before, after = watch(program, samples), watch(program, replaced(samples, **changes))
    assert not torch.allclose(before[VICTIM][0], after[VICTIM][0])
    for b in set(range(5)) - {VICTIM}:
        for old, new in zip(before[b], after[b], strict=True):
            bound = 0.0 if same_layout else 1e-12 * max(1.0, float(old.abs().max()))
            torch.testing.assert_close(old, new, rtol=0, atol=bound)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["video_latents", "text"])
def test_a_nan_that_slips_in_stays_in_its_own_sample(mode, where):
    """Poisoned after collation, which refuses it. On a CPU, no kernel touches two samples."""
    program = make_objective(mode, noise="per_sample")
    batch = batch_of(make_samples(5), mode)
    healthy = prepared_of(program, batch)
    poisoned = prepared_of(program, batch)
    texts = [t[:n].clone() for t, n in zip(batch.text, batch.text_lengths, strict=True)]
    clean_text = torch.cat(texts)
    if where == "text":
        texts[VICTIM][0, 0] = torch.nan
    else:
        poisoned.inputs[VICTIM, 0, 0, 0, 0] = torch.nan
    dirty_text = torch.cat(texts)
    layout = program.lay_out(healthy, batch.text_lengths)
    inputs = poisoned.inputs.clone().requires_grad_()
    out = program.predict(poisoned._replace(inputs=inputs), layout, dirty_text)
    expected_inputs = healthy.inputs.clone().requires_grad_()
    expected = program.predict(healthy._replace(inputs=expected_inputs), layout, clean_text)
    out.sum().backward()
    expected.sum().backward()
    assert bool(out[VICTIM, :, : batch.lengths[VICTIM]].isnan().all())
    for b in set(range(5)) - {VICTIM}:
        assert torch.equal(out[b].detach(), expected[b].detach())
        assert torch.equal(inputs.grad[b], expected_inputs.grad[b])


@pytest.mark.parametrize("mode", ["strict", "padded", "packed"])
def test_a_causal_prefix_does_not_see_the_future_and_a_full_one_does(mode):
    for visibility, sees in (("prefix_causal", False), ("full", True)):
        program = make_objective(mode, visibility=visibility)
        samples = [make_sample(0, 3, 4, words=2), make_sample(1, 3, 4 if mode == "strict" else 2, words=2)]
        batch = batch_of(samples, mode)
        prepared = prepared_of(program, batch)
        layout = program.lay_out(prepared, batch.text_lengths)
        text = torch.cat([sample.text for sample in samples])
        before = program.predict(prepared, layout, text)
        changed = prepared.inputs.clone()
        changed[0, :, 3:7] += 1
        after = program.predict(prepared._replace(inputs=changed), layout, text)
        assert torch.equal(before[0, :, :3], after[0, :, :3]) != sees
        assert not torch.allclose(before[0, :, 3:7], after[0, :, 3:7])
        changed = prepared.inputs.clone()
        changed[0, :, :3] += 1
        after = program.predict(prepared._replace(inputs=changed), layout, text)
        assert not torch.allclose(before[0, :, 3:7], after[0, :, 3:7])


def test_positions_and_geometry_are_each_sample_s_own():
    """The first sample of a batch decides nothing: moving another sample in time moves that sample alone."""
    program = make_objective("packed", noise="per_sample")
    samples = make_samples(4)
    shifted = make_sample(3, 3, 2, words=3, frame_positions=torch.tensor([0, 2, 4, 9, 11]))
    before, after = watch(program, samples), watch(program, [*samples[:3], shifted])
    for b in range(3):
        assert all(torch.equal(old, new) for old, new in zip(before[b], after[b], strict=True))
    assert not torch.allclose(before[3][0], after[3][0])
