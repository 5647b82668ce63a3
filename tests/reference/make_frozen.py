"""Write the frozen reference of the causal program: ``python -m tests.reference.make_frozen``.

A tiny model with fixed weights on a fixed batch of unequal lengths: the random tensors, what the program makes of
them, predictions, loss, every gradient, one AdamW step, and the state of the generator afterwards; at temporal
alignments 1 and 4. The test compares every batching mode with it.

The files beside this script are written once. They change only together with a line in CHANGELOG that says, to a
person, why the numbers of a run may differ from earlier versions; never to make a test pass.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from marey.batching.transport import LatentBatch, Mode, collate
from marey.core.latents import Identity, LatentSample
from marey.models.video_transformer import VideoTransformer, VideoTransformerSize
from marey.objectives.flow import FlowDraws
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_program import ProgramSettings

FOLDER = Path(__file__).parent
ALIGNMENTS = (1, 4)
GEOMETRIES = [(1, 3), (2, 3), (1, 1)]
WORDS = [2, 1, 3]
SIZE = VideoTransformerSize(channels=2, width=16, depth=2, heads=2, patch=2, text_channels=3, mlp_ratio=2.0)


def values(shape: tuple[int, ...], phase: float) -> Tensor:
    """Smooth numbers that no generator makes, so that the inputs need no file of their own."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (torch.sin(count * 0.7 + phase) + 0.5 * torch.cos(count * 1.3 - phase)).reshape(shape).float()


def reference_batch(mode: Mode, alignment: int) -> LatentBatch:
    samples = [
        LatentSample(
            video_latents=values((2, prefix + future, 4, 4), float(i)),
            prefix_frames=prefix,
            future_frames=future,
            frame_positions=torch.arange(prefix + future),
            identity=Identity("reference", str(i), str(i), 0),
            length_hint=prefix + future,
            text=values((WORDS[i], 3), 10.0 + i),
            position=i,
        )
        for i, (prefix, future) in enumerate(GEOMETRIES)
    ]
    return collate(samples, mode=mode, pad_to_multiple_of=alignment)


def reference_program(mode: Mode) -> PrefixSuffixObjective:
    model = VideoTransformer(SIZE)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_(values(tuple(parameter.shape), 0.37 * i) * 0.15 + name.endswith("norm.weight"))
    return PrefixSuffixObjective(model, ProgramSettings(mode=mode, seed=11))


def evaluate(mode: Mode, alignment: int) -> dict[str, Tensor]:
    """Everything that is frozen. Predictions are zero beyond valid frames, which only some modes compute."""
    program, batch = reference_program(mode), reference_batch(mode, alignment)
    draws = FlowDraws(batch, layout="collated", seed=11, micro_step=5)
    prepared = program.prepare(batch, draws)
    assert batch.text is not None
    assert batch.text_lengths is not None
    text = torch.cat([row[:n] for row, n in zip(batch.text, batch.text_lengths, strict=True)])
    prediction = program.predict(prepared, program.lay_out(prepared, batch.text_lengths), text)
    output = program.forward_train_batch(batch, micro_step=5)
    output.loss.backward()
    frozen = {
        "latents": batch.latents,
        "frame_mask": batch.frame_mask,
        "supervised": prepared.supervised,
        "positions": prepared.positions,
        "inputs": prepared.inputs,
        "levels": prepared.times / 1000,
        "targets": prepared.target,
        "predictions": prediction.detach() * batch.frame_mask[:, None, :, None, None],
        "loss": output.loss.detach(),
        "generator": draws.states()[0],
    }
    for name, parameter in program.named_parameters():
        assert parameter.grad is not None
        frozen[f"gradient.{name}"] = parameter.grad.clone()
    # A first Adam step is nearly the sign of the gradient; this eps keeps rounding of small ones from deciding it.
    torch.optim.AdamW(program.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.04).step()
    frozen |= {f"stepped.{name}": parameter.detach() for name, parameter in program.named_parameters()}
    return {name: tensor.contiguous() for name, tensor in frozen.items()}


def frozen_file(alignment: int) -> Path:
    return FOLDER / f"prefix_suffix_alignment_{alignment}.safetensors"


if __name__ == "__main__":
    for alignment in ALIGNMENTS:
        if frozen_file(alignment).exists():
            raise SystemExit(f"{frozen_file(alignment)} exists: delete it by hand, and say why in CHANGELOG")
        save_file(evaluate("padded", alignment), frozen_file(alignment))
        frozen_file(alignment).chmod(0o644)
