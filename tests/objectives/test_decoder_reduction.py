"""Which count divides: the gradient and the partition of samples into microbatches and ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from marey.objectives.flow import FlowSchedule
from marey.objectives.video_decoder import VideoDecoder, step_gradient_scale
from tests.objectives.latent_cases import batch_of, gradients, largest_difference, make_objective, make_samples

COUNT = 8


def settings(normalize_over: str) -> dict[str, Any]:
    return {"noise": "per_sample", "decoder": VideoDecoder(normalize_over=normalize_over), "mode": "packed"}


def optimizer_step_gradients(normalize_over: str, size: int):
    """Gradients of one optimizer step over 8 samples, ``size`` to a microbatch, as a trainer accumulates them."""
    program = make_objective(**settings(normalize_over))
    samples = make_samples(COUNT)
    accumulate = COUNT // size
    elements = 0
    for m in range(accumulate):
        output = program.forward_train_batch(batch_of(samples[m * size : (m + 1) * size]), micro_step=m)
        (output.loss / accumulate).backward()
        elements += output.elements
        assert output.divided == (normalize_over == "microbatch")
    if normalize_over == "step":
        scale = step_gradient_scale(elements=elements, world=1, accumulate=accumulate)
        for parameter in program.parameters():
            parameter.grad.mul_(scale)
    return gradients(program)


class _Step(nn.Module):
    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, batch: Any, micro_step: int) -> Any:
        return self.program.forward_train_batch(batch, micro_step=micro_step)


def _rank(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        program = make_objective(**settings("step"))
        parallel = DistributedDataParallel(_Step(program))
        samples = make_samples(COUNT)[rank * 4 : rank * 4 + 4]
        elements = torch.zeros((), dtype=torch.int64)
        # Two accumulated microbatches of unequal size on each rank.
        for m, (start, stop) in enumerate([(0, 3), (3, 4)]):
            output = parallel(batch_of(samples[start:stop]), m)
            (output.loss / 2).backward()
            elements += output.elements
        distributed.all_reduce(elements)
        scale = step_gradient_scale(elements=int(elements), world=2, accumulate=2)
        for parameter in program.parameters():
            parameter.grad.mul_(scale)
        own = gradients(program)
        # Ranks cut to the same number of forward calls, whatever their own lengths ask for.
        budgeted = make_objective(**settings("step"), max_tokens=48 if rank == 0 else 10_000)
        calls: list[int] = []
        budgeted.model.register_forward_hook(lambda *_: calls.append(1))
        budgeted.forward_train_batch(batch_of(samples), micro_step=0)
        few = make_objective(**settings("step"), max_tokens=48 if rank == 0 else 10_000)
        few.model.register_forward_hook(lambda *_: calls.append(10))
        whole = make_objective(**settings("step"))
        mine = batch_of(samples if rank == 0 else samples[:1])
        total = few.forward_train_batch(mine, micro_step=0).total
        same = torch.allclose(total, whole.forward_train_batch(mine, micro_step=0).total, rtol=1e-13)
        torch.save((own, sum(calls), same), folder / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [context.Process(target=_rank, args=(rank, port, folder), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("size", [4, 1])
def test_normalized_over_the_step_the_partition_does_not_matter(size):
    assert largest_difference(optimizer_step_gradients("step", 8), optimizer_step_gradients("step", size)) <= 1e-10


def test_normalized_over_the_step_two_ranks_give_the_gradient_of_one(two_ranks):
    expected = optimizer_step_gradients("step", 8)
    for own, _, _ in two_ranks:
        assert largest_difference(expected, own) <= 1e-10


def test_ranks_make_the_same_number_of_forward_calls(two_ranks):
    calls = [calls for _, calls, _ in two_ranks]
    assert calls[0] == calls[1]
    assert calls[0] % 10 > 1
    assert all(same for _, _, same in two_ranks)


def test_one_microbatch_is_normalized_the_same_way_by_both():
    a, b = (optimizer_step_gradients(over, 8) for over in ("step", "microbatch"))
    assert largest_difference(a, b) <= 1e-12


def test_normalized_over_microbatches_the_partition_changes_the_gradient():
    """On lengths of 2 to 8 frames the gradient moves by tens of percent: short samples weigh more when alone."""
    whole = optimizer_step_gradients("microbatch", 8)
    differences = {size: largest_difference(whole, optimizer_step_gradients("microbatch", size)) for size in (4, 1)}
    assert differences[4] > 0.02
    assert 0.1 < differences[1] < 2.0


def test_the_bell_weighs_the_middle_and_averages_one_over_the_grid():
    decoder = VideoDecoder(weighting="logit_bell")
    times = 1000 * FlowSchedule().grid()
    weights = decoder.weights(times)
    raw = torch.exp(-2 * ((times - 500) / 1000) ** 2)
    expected = raw - raw.min()
    torch.testing.assert_close(weights, expected / expected.mean())
    assert weights.min() == 0
    assert weights.mean() == pytest.approx(1)
    assert float(times[weights.argmax()]) == pytest.approx(500, abs=2)
    assert bool((VideoDecoder().weights(times) == 1).all())


def test_the_total_is_summed_in_float32_over_supervised_frames_alone():
    torch.manual_seed(0)
    prediction, target = torch.randn(2, 2, 3, 4, 5, 5).bfloat16()
    supervised = torch.tensor([[False, True, True, False], [False, False, True, True]])
    times = torch.rand(2, 4) * 1000
    decoder = VideoDecoder(weighting="logit_bell")
    total = decoder.total(prediction, target, supervised=supervised, times=times)
    squares = (prediction.double() - target.double()).square()
    expected = sum(squares[b, :, t].sum() * decoder.weights(times)[b, t] for b, t in supervised.nonzero().tolist())
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    poisoned = prediction.clone()
    poisoned[0, :, 0] = torch.nan
    assert decoder.total(poisoned, target, supervised=supervised, times=times) == total
