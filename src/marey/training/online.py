"""What an encoder knows while it trains: a small fixed set of labelled clips, looked at now and then.

Nothing here is drawn from a stream and nothing of the model is changed: a run that looks has the weights of one that
does not, bit by bit. Every rank does the same work, so that sharded weights are gathered by all and nobody waits.

Legend: n clips of the set, T frames, D features, O embedding width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from marey.config.schema import EncoderConfig, SigregKwargs
from marey.core.errors import UserError
from marey.core.keys import permutation
from marey.core.tokens import TokenGroup, grid_positions, grid_shape, patchify
from marey.objectives.collapse import rankme
from marey.objectives.sigreg import SigReg
from marey.pixels.digits import demo_source
from marey.pixels.episodes import EpisodeSource
from marey.pixels.evalclips import EvalClips
from marey.pixels.open import open_source

COLUMNS = ("probe/knn", "probe/rank", "probe/sigreg")
NEIGHBOURS, TEMPERATURE = 20, 0.07
"""The 20 nearest clips vote with weight ``exp(similarity / 0.07)`` (Wu et al. 2018, arXiv 1805.01978)."""
DEMO = "demo:"
CHUNK = 16
"""Clips of one forward pass."""


def open_probe(config: EncoderConfig) -> OnlineProbe | None:
    """The probe of ``config``, its data opened; None where it is off. UserError for data that cannot be opened."""
    if config.probe.every_n_steps is None:
        return None
    path = config.probe.data
    if path is None:
        given = config.data.val if config.data.val is not None else config.data.train
        path = given if isinstance(given, str) else given[0].path
    if path.startswith(DEMO):
        path = str(demo_source(path.removeprefix(DEMO)))
    source = open_source(
        str(Path(path).expanduser()),
        name=None,
        video_rate=config.data.video_rate,
        video_episode_length=config.data.video_episode_length,
    )
    return OnlineProbe(config, source)


class OnlineProbe:
    """``probe.clips`` clips of one source, one an episode, drawn once by the seed and read at the first look."""

    def __init__(self, config: EncoderConfig, source: EpisodeSource) -> None:
        model = config.model
        assert config.probe.every_n_steps is not None
        self.every: int = config.probe.every_n_steps
        self.source = source
        self._model = model
        self._clips = EvalClips(
            source, num_frames=model.num_frames, frame_stride=config.frame_stride, img_size=model.img_size
        )
        self._numbers = permutation(len(self._clips), config.seed, "online-probe")[: config.probe.clips].tolist()
        kwargs = config.loss.sigreg.kwargs
        # By the number of clips and not of ranks: they all hold the same ones.
        self._sigreg = SigReg(
            SigregKwargs(num_proj=kwargs.num_proj, knots=kwargs.knots, normalize_by_n=True), seed=config.seed
        )
        self._set: tuple[Tensor, Tensor, Tensor] | None = None

    def describe(self) -> str:
        """One line for people."""
        labelled = self.source.labels is not None and bool((self.source.labels >= 0).any())
        words = "" if labelled else "; it has no labels, so rank and SIGReg alone"
        return f"every {self.every:,} steps on {len(self._numbers):,} clips of {self.source.path}{words}"

    def look(self, objective: nn.Module) -> dict[str, float]:
        """By column: accuracy of nearest neighbours of other videos (absent without labels), RankMe of the features,
        SIGReg's statistic of the embeddings along directions that are always the same.

        Raises UserError where no clip of the set can be read.
        """
        patches, labels, videos = self._set = self._set or self._read()
        encoder, projector = objective.encoder, objective.projector
        device = next(objective.parameters()).device
        positions = self._positions().to(device)
        features, embeddings = [], []
        with _asleep(objective), torch.no_grad():
            for part in torch.split(patches, CHUNK):
                group = TokenGroup(part.to(device), positions.expand(len(part), -1, -1))
                (summary,) = encoder.summarise_groups([group])  # type: ignore[operator, union-attr]
                features.append(summary.float().cpu())
                embeddings.append(projector(summary.unsqueeze(1)).float().cpu())  # type: ignore[operator]
            x, z = torch.cat(features), torch.cat(embeddings)
            found = {
                "probe/rank": float(rankme(x)),
                "probe/sigreg": float(self._sigreg(z.transpose(0, 1), micro_step=0)) * len(z),
            }
        accuracy = neighbour_accuracy(x, labels, videos)
        return found if accuracy is None else {"probe/knn": accuracy, **found}

    def _positions(self) -> Tensor:
        model = self._model
        grid = grid_shape(
            model.num_frames, model.img_size, model.img_size, patch=model.patch_size, tubelet=model.tubelet_size
        )
        return grid_positions(grid).unsqueeze(0)

    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 patches ``[n, N, P]``, labels ``[n]`` (-1: none) and videos by number ``[n]``, on the CPU."""
        found = self._clips.__getitems__(self._numbers)
        if not len(found.episodes):
            raise UserError(
                f"probe.data={self.source.path}: none of its {len(self._numbers)} clips can be read; the first: "
                f"{found.refused[0].reason}"
            )
        files = {file: number for number, file in enumerate(dict.fromkeys(self.source.files))}
        videos = [files[self.source.files[episode]] for episode in found.episodes.tolist()]
        patches = patchify(found.video, patch=self._model.patch_size, tubelet=self._model.tubelet_size)
        return patches, torch.from_numpy(np.ascontiguousarray(found.labels)), torch.tensor(videos)


def neighbour_accuracy(features: Tensor, labels: Tensor, videos: Tensor) -> float | None:
    """Share of labelled clips whose class the 20 nearest labelled clips of other videos name; None where nobody can.

    Fewer than 20 where a class has fewer on average: the others' classes would outvote a clip's own.
    features: ``[n, D]``; labels, videos: int64 ``[n]``, label -1 for none. A clip without a neighbour is wrong.
    """
    known = labels >= 0
    place = {label: i for i, label in enumerate(sorted(set(labels[known].tolist())))}
    if len(place) < 2:
        return None
    x = torch.nn.functional.normalize(features[known].double(), dim=1)
    classes = torch.tensor([place[label] for label in labels[known].tolist()])
    other = videos[known].unsqueeze(0) != videos[known].unsqueeze(1)
    similarity = (x @ x.T).masked_fill(~other, float("-inf"))
    nearest = similarity.topk(min(NEIGHBOURS, max(1, len(x) // len(place))), dim=1)
    votes = torch.zeros(len(x), len(place), dtype=torch.float64)
    votes.scatter_add_(1, classes[nearest.indices], torch.exp(nearest.values / TEMPERATURE))
    right = (votes.argmax(dim=1) == classes) & (votes.amax(dim=1) > 0)
    return float(right.double().mean())


@contextmanager
def _asleep(objective: nn.Module) -> Iterator[None]:
    """In evaluation mode, so that no running statistic moves; every module's own mode afterwards."""
    awake: list[Any] = [module for module in objective.modules() if module.training]
    objective.eval()
    try:
        yield
    finally:
        for module in awake:
            module.training = True
