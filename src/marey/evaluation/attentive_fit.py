"""Training the attentive probe on frozen tokens, and choosing its settings on videos kept aside for that.

Legend: n training clips, m clips to classify, S settings, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from marey.core.keys import permutation
from marey.core.progress import Progress
from marey.evaluation.attentive import AttentiveProbes
from marey.evaluation.by_video import Videos
from marey.evaluation.split import VALIDATION_SHARE, held_out
from marey.evaluation.token_features import Tokens

BATCH = 64
EPOCHS = 30
MIN_STEPS = 100
"""A handful of clips is gone through more often than ``EPOCHS`` times."""
WARMUP = 0.1


@dataclass(frozen=True)
class Setting:
    """What AdamW is given; weight decay is on matrices alone."""

    lr: float
    weight_decay: float


GRID = tuple(Setting(lr, decay) for lr in (3e-4, 1e-3, 3e-3) for decay in (0.1, 3.0))
DEFAULT = Setting(1e-3, 0.1)
"""Where there are too few videos to keep some aside for a choice."""


@dataclass(frozen=True)
class Choice:
    """The setting of one attentive probe and how it was come by."""

    setting: Setting
    validation_videos: int
    """0: there were too few to choose by, and ``setting`` is the default."""
    validation_right: list[int]
    """Of those videos, by setting of the grid."""
    steps: int
    loss: float
    """Cross-entropy over the last tenth of the final training."""


@dataclass(frozen=True)
class AttentiveFit:
    """Trained probes, one for each setting."""

    probes: AttentiveProbes
    steps: int
    loss: list[float]
    """``[S]``: training loss, the mean of the last tenth of the steps."""

    @torch.inference_mode()
    def probabilities(self, tokens: Tokens) -> NDArray[np.float64]:
        """``[S, m, K]``."""
        device = self.probes.query.device
        parts = [
            self.probes(tokens.batch(range(start, min(start + BATCH, len(tokens))), device=device)).double().softmax(-1)
            for start in range(0, len(tokens), BATCH)
        ]
        return np.asarray(torch.cat(parts, dim=1).cpu().numpy())


def protocol() -> dict[str, Any]:
    """The fixed parts of the protocol, ready for JSON."""
    return {
        "optimizer": "AdamW, linear warmup over the first tenth of the steps, cosine to 0",
        "grid": [asdict(setting) for setting in GRID],
        "default": asdict(DEFAULT),
        "batch": BATCH,
        "epochs": EPOCHS,
        "min_steps": MIN_STEPS,
        "validation_share": VALIDATION_SHARE,
    }


def fit_attentive(
    tokens: Tokens,
    y: NDArray[np.int64],
    *,
    classes: int,
    settings: Sequence[Setting],
    seed: int,
    device: torch.device | str = "cpu",
    after_step: Callable[[], None] = lambda: None,
) -> AttentiveFit:
    """One probe for each setting, all from one start and on the same batches: each learns what it would alone.

    y: int64 ``[n]``, class numbers below ``classes``. Batches are keyed by ``seed`` and the epoch.
    """
    probes = _fresh(tokens, probes=len(settings), classes=classes, seed=seed).to(device)
    target = torch.from_numpy(y).to(device)
    slices = [_slice(probes, place, setting) for place, setting in enumerate(settings)]
    optimizer = torch.optim.AdamW([group for groups, _ in slices for group in groups], fused=True)
    batches, steps = _length(len(y))
    losses: list[torch.Tensor] = []
    for step in range(steps):
        epoch, part = divmod(step, batches)
        if part == 0:
            shares = np.array_split(permutation(len(y), seed, "probe-attentive-order", epoch), batches)
        places = np.sort(shares[part])  # in the order in which they lie on disk
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * _schedule(step, steps)
        logits = probes(tokens.batch(places, device=device))  # [S, B, K]
        each = cross_entropy(
            logits.flatten(0, 1), target[torch.from_numpy(places).to(device)].repeat(len(settings)), reduction="none"
        )
        loss = each.view(len(settings), -1).mean(dim=1)
        probes.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        for place, (_, pairs) in enumerate(slices):
            for own, whole in pairs:
                own.grad = None if whole.grad is None else whole.grad[place]
        optimizer.step()
        losses.append(loss.detach())
        after_step()
    return AttentiveFit(probes, steps, torch.stack(losses[-max(1, steps // 10) :]).mean(dim=0).tolist())


def _length(clips: int) -> tuple[int, int]:
    """(batches of an epoch, steps) of a training on so many clips."""
    batches = math.ceil(clips / BATCH)
    return batches, max(EPOCHS * batches, MIN_STEPS)


def _fresh(tokens: Tokens, *, probes: int, classes: int, seed: int) -> AttentiveProbes:
    mean, deviation = tokens.spread()
    # A channel that never varies carries nothing; dividing by its rounding noise would invent something.
    varies = deviation > 1e-6 * max(1.0, float(np.abs(mean).max()))
    inverse = np.where(varies, 1 / np.where(varies, deviation, 1), 0)
    return AttentiveProbes(
        probes=probes, classes=classes, mean=torch.from_numpy(mean), inverse=torch.from_numpy(inverse), seed=seed
    )


def _slice(
    probes: AttentiveProbes, place: int, setting: Setting
) -> tuple[list[dict[str, Any]], list[tuple[torch.Tensor, torch.nn.Parameter]]]:
    """Optimizer groups over one probe's part of every parameter, which share its memory, and what each is part of."""
    pairs = [(whole.detach()[place], whole) for whole in probes.parameters()]
    groups = [
        {
            "params": [own for own, _ in pairs if (own.ndim > 1) == decays],
            "lr": setting.lr,
            "peak": setting.lr,
            "weight_decay": setting.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return groups, pairs


def _schedule(step: int, steps: int) -> float:
    warm = WARMUP * steps
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def probe_attentive(
    tokens: Tokens,
    y: NDArray[np.int64],
    videos: Sequence[str],
    *,
    classes: int,
    seed: int,
    device: torch.device | str = "cpu",
    label: str | None = None,
) -> tuple[AttentiveFit, Choice]:
    """A probe of the setting that does best on a fifth of the training videos, then trained on all of them.

    The choice is by videos rightly classified, and among equals by the lower cross-entropy. Where a class cannot spare
    a video, ``DEFAULT`` is taken. label: progress is shown under this name; None shows none.
    """
    validation = held_out(videos, y, share=VALIDATION_SHARE, seed=seed, purpose="probe-validation")
    inside, outside = np.flatnonzero(~validation), np.flatnonzero(validation)
    can_choose = len(outside) > 0 and len(np.unique(y[inside])) == len(np.unique(y)) > 1
    setting, right, count = DEFAULT, [0] * len(GRID), 0
    total = _length(len(y))[1] + (_length(len(inside))[1] if can_choose else 0)
    with Progress(label, total=total, unit="steps") if label else nullcontext() as progress:
        after_step = progress.advance if progress is not None else _nothing
        if can_choose:
            fit = fit_attentive(
                tokens.take(inside),
                y[inside],
                classes=classes,
                settings=GRID,
                seed=seed,
                device=device,
                after_step=after_step,
            )
            units = Videos.of([videos[i] for i in outside.tolist()], y[outside])
            answers = [units.mean(p) for p in fit.probabilities(tokens.take(outside))]
            right = [int((p.argmax(axis=1) == units.truth).sum()) for p in answers]
            loss = [-float(np.log(p[np.arange(len(p)), units.truth] + 1e-12).mean()) for p in answers]
            best = max(range(len(GRID)), key=lambda place: (right[place], -loss[place]))
            setting, count = GRID[best], len(units.truth)
        final = fit_attentive(
            tokens, y, classes=classes, settings=[setting], seed=seed, device=device, after_step=after_step
        )
    return final, Choice(setting, count, right, final.steps, final.loss[0])


def _nothing() -> None:
    pass
