"""A predicted future as a picture that plays beside what followed."""

from __future__ import annotations

from marey.evaluation.films import moving_uri, side_by_side
from marey.evaluation.future_page import Film
from marey.evaluation.pictures import data_uri
from marey.evaluation.rolling import PREDICTION, STILL, Rollout
from marey.evaluation.rollout import frames_per_second


def film_of(item: Rollout) -> Film:
    """The film of one rollout, at half speed, for eyes; its caption names the clip and the error."""
    frames = side_by_side(
        [("what followed", item.target_pictures), ("predicted", item.predicted_pictures)], known=item.known_pictures
    )
    errors = {name: item.mean(name) for name in (PREDICTION, STILL)}
    share = (
        f"{errors[PREDICTION] / errors[STILL]:.2f} times a still image's error" if errors[STILL] > 0 else "it is still"
    )
    uri = moving_uri(frames, fps=frames_per_second(item) / 2)
    return Film(uri, data_uri(frames[-1]), f"{item.clip.name.split('/')[-1]}: {share}")
