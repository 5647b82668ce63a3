"""Checks of ``gpu.py`` on the encoder and on ranks: the device against float64 on the CPU, or bits against bits.

Every check is a function of a place; on a CPU, at small sizes, it runs the same lines through the CPU's kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_rows import Found, Place, Row, within, worst, worst_gradient
from marey.config.compose import load_config
from marey.config.schema import EncoderConfig
from marey.core.pixelstats import normalize_patches
from marey.core.tokens import TokenGroup, ViewChunk, grid_positions, grid_shape
from marey.objectives.invariance import InvarianceObjective
from marey.objectives.registry import build
from marey.objectives.sigreg import SigReg

CPU = torch.device("cpu")
FLOAT32, FLOAT64, BF16 = torch.float32, torch.float64, torch.bfloat16
SMALLEST = ("model.img_size=32", "model.num_frames=4", "augmentation.local_size=16", "projector.hidden_dim=16")
"""The encoder that a CPU rehearses with."""


# -- the encoder


def encoder_config(place: Place, *overrides: str) -> EncoderConfig:
    """A small encoder with the default's proportions."""
    size = SMALLEST if place.small else ("model.name=vit_small", "model.img_size=96")
    return load_config(["recipe=smoke", *size, *overrides])


def random_chunk(config: EncoderConfig, clips: int, *, seed: int = 0) -> ViewChunk:
    """What a loader ships for ``clips`` clips, with random pixels and random kept tokens."""
    model, augmentation = config.model, config.augmentation
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for side, views in ((model.img_size, 1), (augmentation.local_size, augmentation.local_crops_number)):
        positions = grid_positions(
            grid_shape(model.num_frames, side, side, patch=model.patch_size, tubelet=model.tubelet_size)
        )
        kept = max(1, round(len(positions) * (1 - model.token_drop_rate)))
        scores = torch.rand(clips * views, len(positions), generator=generator)
        chosen = scores.topk(kept, dim=1).indices.sort(dim=1).values
        values = 3 * model.tubelet_size * model.patch_size**2
        patches = torch.randint(0, 256, (clips * views, kept, values), dtype=torch.uint8, generator=generator)
        groups.append(TokenGroup(patches, positions[chosen]))
    nobody = torch.zeros(0, 3, dtype=torch.int64)
    return ViewChunk(groups[0], groups[1], torch.zeros(clips, 5, dtype=torch.int64), nobody, [])


def chunk_to(chunk: ViewChunk, device: torch.device) -> ViewChunk:
    groups = [TokenGroup(*(x.to(device) for x in group)) for group in (chunk.views_global, chunk.views_local)]
    return chunk._replace(views_global=groups[0], views_local=groups[1])


def encoder_step(
    config: EncoderConfig, chunks: list[ViewChunk], place: Place, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """The objective with its gradients, and the loss."""
    objective = build(config).to(place.device, dtype)
    assert isinstance(objective, InvarianceObjective)
    loss = objective.forward_train_batch([chunk_to(c, place.device) for c in chunks], micro_step=0).loss
    torch.autograd.backward(loss)
    return objective, loss.detach()


def encoder(place: Place, *, dtype: torch.dtype, limit: float) -> Found:
    """Loss and gradients in both attention modes and both rotary layouts against float64 on the CPU."""
    numbers = {}
    for mode in ("full", "block_causal"):
        for rope in ("tiled", "rotary"):
            config = encoder_config(place, f"model.attn_mode={mode}", f"model.rope_layout={rope}")
            chunks = [random_chunk(config, 4)]
            own, loss = encoder_step(config, chunks, place, dtype)
            reference, expected = encoder_step(config, chunks, Place(CPU, place.small), FLOAT64)
            numbers[f"{mode}, {rope}"] = max(worst(loss, expected), worst_gradient(own, reference))
    return within(numbers, limit)


def mixed_precision(place: Place) -> Found:
    """The loss of one step in bf16-mixed against float32."""
    config = encoder_config(place)
    chunks = [random_chunk(config, 8)]
    _, expected = encoder_step(config, chunks, place, FLOAT32)
    with place.bf16():
        _, loss = encoder_step(config, chunks, place, FLOAT32)
    return within({"loss": worst(loss, expected)}, 3e-2)


def sigreg(place: Place) -> Found:
    """Value and gradient under bf16 autocast against float64: the statistic is computed in float32 all the same."""
    config = encoder_config(place)
    statistic = SigReg(config.loss.sigreg.kwargs, seed=0)
    z = torch.randn(3, 64 if place.small else 512, 64, generator=torch.Generator().manual_seed(0)) * 1.3 + 0.1
    own, exact = z.to(place.device, copy=True).requires_grad_(), z.double().requires_grad_()
    with place.bf16():
        value = statistic(own, micro_step=3)
    expected = statistic(exact, micro_step=3)
    value.backward()
    expected.backward()
    assert own.grad is not None
    assert exact.grad is not None
    return within({"value": worst(value, expected), "gradient": worst(own.grad, exact.grad)}, 2e-5)


def micro_batches(place: Place) -> Found:
    """``loader.micro_batch_size`` changes memory and no gradient (float64)."""
    config = encoder_config(place)
    whole = random_chunk(config, 4)
    views = config.augmentation.local_crops_number
    halves = [
        whole._replace(
            views_global=TokenGroup(*(x[2 * i : 2 * i + 2] for x in whole.views_global)),
            views_local=TokenGroup(*(x[2 * i * views : (2 * i + 2) * views] for x in whole.views_local)),
        )
        for i in (0, 1)
    ]
    one, loss = encoder_step(config, [whole], place, FLOAT64)
    two, other = encoder_step(config, halves, place, FLOAT64)
    return within({"loss": worst(other, loss), "gradients": worst_gradient(two, one)}, 1e-10)


def normalising(place: Place) -> Found:
    """Every byte in every channel: normalised on the device as in a worker, bit for bit."""
    patches = torch.arange(256, dtype=torch.uint8).repeat(3).unsqueeze(0)
    numbers = {}
    for dtype in (FLOAT32, FLOAT64, BF16):
        worker, device = (normalize_patches(patches.to(d), dtype=dtype).cpu() for d in (CPU, place.device))
        numbers[f"bytes that differ, {str(dtype).removeprefix('torch.')}"] = float((worker != device).sum())
    return within(numbers, 0.0)


# -- ranks


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


@contextmanager
def group_of_one(place: Place) -> Iterator[None]:
    """A process group of one rank: NCCL on CUDA, gloo on a CPU."""
    from torch import distributed

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        backend = "nccl" if place.on_cuda else "gloo"
        distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()


def sharded(place: Place) -> Found:
    """All-reduce over one rank, and an encoder step under FSDP2 against the same step without."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    config = encoder_config(place)
    chunk = random_chunk(config, 4)
    plain, expected = encoder_step(config, [chunk], place, FLOAT32)
    expected_gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    with group_of_one(place):
        summed = torch.arange(4.0, device=place.device)
        distributed.all_reduce(summed)
        mesh = init_device_mesh(place.device.type, (1,))
        objective = build(config).to(place.device)
        assert isinstance(objective, InvarianceObjective)
        for block in objective.encoder.blocks:
            fully_shard(block, mesh=mesh)
        loss = objective.forward_train_batch([chunk_to(chunk, place.device)], micro_step=0).loss
        torch.autograd.backward(loss)
        gradients: list[Tensor] = []
        for parameter in objective.parameters():
            found = parameter.grad
            if isinstance(found, DTensor):
                gradients.append(found.full_tensor())
            elif found is not None:
                gradients.append(found)
        numbers = {
            "all-reduce": float((summed.cpu() - torch.arange(4.0)).abs().max()),
            "loss": worst(loss, expected),
            "gradients": worst(
                torch.cat([g.flatten() for g in gradients]), torch.cat([g.flatten() for g in expected_gradients])
            ),
        }
    return within(numbers, 1e-5)


CHECKS: list[Row] = [
    Row("encoder, float64", partial(encoder, dtype=FLOAT64, limit=1e-10), 40),
    Row("encoder, float32", partial(encoder, dtype=FLOAT32, limit=1e-4), 40),
    Row("encoder, bf16-mixed against float32", mixed_precision, 20),
    Row("SIGReg under bf16 autocast", sigreg, 20),
    Row("micro_batch_size: the same gradients", micro_batches, 20),
    Row("normalising on the device: the worker's bits", normalising, 10),
    Row("one rank: all-reduce, FSDP2", sharded, 30),
]
