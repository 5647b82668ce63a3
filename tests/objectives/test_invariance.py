from __future__ import annotations

import pytest
import torch

from marey.config.schema import ProjectorConfig, SigregKwargs
from marey.core.pixelstats import normalize_patches
from marey.core.tokens import TokenGroup, ViewChunk, grid_positions
from marey.models.projector import build_projector
from marey.objectives.base import StepOutput
from marey.objectives.invariance import InvarianceObjective, invariance_loss
from marey.objectives.sigreg import SigReg
from tests.distributed import run_ranks
from tests.models.samples import encoder, kept_tokens

LOCALS = 3


def objective(norm_group: int | None = 4, weight: float = 0.02) -> InvarianceObjective:
    model = encoder()
    config = ProjectorConfig(hidden_dim=48, output_dim=16, norm_group=norm_group)
    return InvarianceObjective(
        encoder=model,
        projector=build_projector(config, width=model.embed_dim, seed=0).double(),
        sigreg=SigReg(SigregKwargs(knots=17, num_proj=64, normalize_by_n=False), seed=0),
        sigreg_weight=weight,
    )


def views(count: int, grid: tuple[int, int, int], keep: int, *, seed: int) -> TokenGroup:
    positions = grid_positions(grid)
    kept = kept_tokens(count, len(positions), keep, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randint(0, 256, (count, keep, 192), dtype=torch.uint8, generator=generator)
    return TokenGroup(patches, positions[kept])


def chunks(size: int, *, clips: int = 8, locals_: int = LOCALS) -> list[ViewChunk]:
    """The same ``clips`` clips, cut into consecutive chunks of ``size``."""
    wide, narrow = views(clips, (4, 4, 4), 20, seed=1), views(clips * locals_, (4, 2, 2), 5, seed=2)
    batch = []
    for start in range(0, clips, size):
        a, b = slice(start, start + size), slice(start * locals_, (start + size) * locals_)
        batch.append(
            ViewChunk(
                TokenGroup(wide.patches[a], wide.positions[a]),
                TokenGroup(narrow.patches[b], narrow.positions[b]),
                torch.zeros(size, 5, dtype=torch.int64),
                torch.zeros(0, 3, dtype=torch.int64),
                [],
            )
        )
    return batch


def gradients(model: InvarianceObjective, batch: list[ViewChunk]) -> tuple[StepOutput, dict[str, torch.Tensor]]:
    out = model.forward_train_batch(batch, micro_step=7)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    largest = max(float(g.abs().max()) for g in b.values())
    assert largest > 0
    assert a.keys() == b.keys()
    for name in b:
        assert float((a[name] - b[name]).abs().max()) <= 1e-10 * largest, name


def test_the_loss_is_the_published_one_step_by_step() -> None:
    model = objective()
    (chunk,) = batch = chunks(8)
    out, _ = gradients(model, batch)
    with torch.no_grad():
        wide, narrow = model.encoder.encode_groups([chunk.views_global, chunk.views_local])
        summaries = torch.stack([torch.cat((wide[i, :1], narrow[i * LOCALS : (i + 1) * LOCALS, 0])) for i in range(8)])
        z = model.projector(summaries)
        invariance = torch.tensor(
            [[(z[i, 0] - z[i, v]).square().mean() for v in range(LOCALS + 1)] for i in range(8)],
            dtype=torch.float64,
        ).mean()
        sigreg = torch.stack([model.sigreg(z[None, :, v], micro_step=7) for v in range(LOCALS + 1)]).mean()
    assert float(out.parts["invariance"]) == pytest.approx(float(invariance), rel=1e-12)
    assert float(out.parts["sigreg"]) == pytest.approx(float(sigreg), rel=1e-12)
    assert float(out.loss.detach()) == pytest.approx(float(invariance + 0.02 * sigreg), rel=1e-12)
    torch.testing.assert_close(out.embeddings, z[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(out.features, summaries[:, 0], rtol=0, atol=1e-12)
    assert out.clips == 8
    assert out.tokens == 8 * 21 + 24 * 6
    assert not any(x.requires_grad for x in (*out.parts.values(), out.embeddings, out.features))


@pytest.mark.parametrize("size", [4, 2, 1])
def test_chunks_change_memory_and_no_gradient(size: int) -> None:
    whole, expected = gradients(objective(), chunks(8))
    out, got = gradients(objective(), chunks(size))
    assert float(out.loss.detach()) == pytest.approx(float(whole.loss.detach()), rel=1e-13)
    assert (out.clips, out.tokens) == (whole.clips, whole.tokens)
    assert_same_gradients(got, expected)


def test_chunks_keep_no_activations_of_the_encoder() -> None:
    kept: dict[int, int] = {}
    for size in (8, 1):
        total = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.numel() * x.itemsize
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            objective().forward_train_batch(chunks(size), micro_step=0)
        kept[size] = total
    assert kept[1] < kept[8] / 5


class Step(torch.nn.Module):
    """What DistributedDataParallel needs: a module whose forward is the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = objective()

    def forward(self, batch: list[ViewChunk]) -> torch.Tensor:
        return self.objective.forward_train_batch(batch, micro_step=7).loss


def one_rank(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Half of the clips, in chunks of 4 and of 2, averaged over ranks by hand and by DistributedDataParallel."""
    results = {}
    for size in (4, 2):
        batch = chunks(size)
        mine = batch[rank * len(batch) // 2 : (rank + 1) * len(batch) // 2]
        out, got = gradients(objective(), mine)
        for grad in got.values():
            torch.distributed.all_reduce(grad)
            grad /= 2
        results[f"chunks of {size}"] = got | {"sigreg": out.parts["sigreg"], "loss": out.loss.detach()}
    step = torch.nn.parallel.DistributedDataParallel(Step())
    step(mine).backward()
    results["ddp"] = {n.removeprefix("module.objective."): p.grad for n, p in step.named_parameters()}
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    return run_ranks(one_rank, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("size", [4, 2])
def test_two_ranks_give_the_gradient_of_one_process(
    size: int, two_ranks: list[dict[str, dict[str, torch.Tensor]]]
) -> None:
    whole, expected = gradients(objective(), chunks(8))
    results = [dict(rank[f"chunks of {size}"]) for rank in two_ranks]
    losses = [float(result.pop("loss")) for result in results]
    assert sum(losses) / 2 == pytest.approx(float(whole.loss.detach()), rel=1e-12)
    for got in results:
        assert float(got.pop("sigreg")) == pytest.approx(float(whole.parts["sigreg"]), rel=1e-12)
        assert_same_gradients(got, expected)


def test_distributed_data_parallel_gives_the_gradient_of_one_process(
    two_ranks: list[dict[str, dict[str, torch.Tensor]]],
) -> None:
    _, expected = gradients(objective(), chunks(8))
    for rank in two_ranks:
        assert_same_gradients(rank["ddp"], expected)


def test_both_sides_of_the_invariance_get_gradient() -> None:
    z = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(invariance_loss, (z,))
    invariance_loss(z).backward()
    assert bool((z.grad.abs().amax(-1) > 0).all())


def test_without_local_views_only_the_gaussian_term_is_left() -> None:
    for size in (8, 2):
        out, got = gradients(objective(), chunks(size, locals_=0))
        assert float(out.parts["invariance"]) == 0
        assert float(out.loss.detach()) == pytest.approx(0.02 * float(out.parts["sigreg"]))
        assert float(got["encoder.cls_token"].abs().max()) > 0
        assert out.tokens == 8 * 21


def test_every_parameter_gets_a_gradient() -> None:
    _, got = gradients(objective(), chunks(8))
    assert all(grad is not None for grad in got.values())


def test_a_clips_loss_does_not_depend_on_which_process_held_which_clip_first() -> None:
    model = objective(norm_group=None, weight=0.02)
    (chunk,) = chunks(8)
    order = torch.tensor([3, 1, 7, 0, 5, 2, 6, 4])
    rows = (order[:, None] * LOCALS + torch.arange(LOCALS)).flatten()
    mixed = chunk._replace(
        views_global=TokenGroup(*(x[order] for x in chunk.views_global)),
        views_local=TokenGroup(*(x[rows] for x in chunk.views_local)),
    )
    a, b = (model.forward_train_batch([x], micro_step=0).loss.detach() for x in (chunk, mixed))
    assert float(a) == pytest.approx(float(b), rel=1e-12)


def test_half_precision_autocast_gives_nearly_the_same_loss_with_float32_statistics() -> None:
    model = objective().float()
    exact = model.forward_train_batch(chunks(4), micro_step=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model.forward_train_batch(chunks(4), micro_step=0)
    rough.loss.backward()
    assert {part.dtype for part in rough.parts.values()} == {torch.float32}
    assert float(rough.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.02)


def test_a_loss_without_gradient_is_the_same_loss() -> None:
    model = objective()
    expected = model.forward_train_batch(chunks(2), micro_step=0).loss.detach()
    with torch.no_grad():
        assert torch.equal(model.forward_train_batch(chunks(2), micro_step=0).loss, expected)


def test_patches_normalised_by_the_loader_give_the_same_loss() -> None:
    model = objective()
    (chunk,) = chunks(8)
    ready = chunk._replace(
        views_global=chunk.views_global._replace(
            patches=normalize_patches(chunk.views_global.patches, dtype=torch.float64)
        ),
        views_local=chunk.views_local._replace(
            patches=normalize_patches(chunk.views_local.patches, dtype=torch.float64)
        ),
    )
    a, b = (model.forward_train_batch([x], micro_step=0).loss.detach() for x in (chunk, ready))
    assert torch.equal(a, b)


def test_the_checkpoint_holds_encoder_and_projector_and_nothing_else() -> None:
    assert {name.split(".")[0] for name in objective().state_dict()} == {"encoder", "projector"}
