from __future__ import annotations

import dataclasses
import html as markup
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from marey.core.errors import UserError
from marey.evaluation import page as html_pieces
from marey.evaluation.feature_maps import Place
from marey.evaluation.feature_pictures import feature_parts, neighbour_part, similarity_part
from marey.evaluation.gathering import Gathered, draw_clips, gather
from marey.evaluation.loading import load_encoder, random_twin
from tests.evaluation.coloured_source import ColouredSource
from tests.evaluation.test_page import read


def gathered(checkpoint: Path, source: ColouredSource, *, count: int = 12, pictured: int = 2) -> Gathered:
    loaded = load_encoder(checkpoint)
    clips, numbers = draw_clips(source, loaded.preprocessing, count=count, seed=0)
    encoders = {"pretrained": loaded.encoder, "random weights": random_twin(loaded)}
    return gather(encoders, loaded.preprocessing, clips, numbers, pictured=pictured)


def test_clips_are_drawn_by_the_seed_and_spread_over_episodes_before_they_repeat_one(checkpoint):
    preprocessing = load_encoder(checkpoint).preprocessing
    source = ColouredSource([0] * 6, length=60)
    clips, numbers = draw_clips(source, preprocessing, count=6, seed=0)
    assert sorted(numbers) == list(range(6))
    assert clips.clips_per_episode == 1
    assert draw_clips(source, preprocessing, count=6, seed=0)[1] == numbers
    assert draw_clips(source, preprocessing, count=6, seed=1)[1] != numbers
    clips, numbers = draw_clips(source, preprocessing, count=15, seed=0)
    assert (clips.clips_per_episode, len(set(numbers))) == (3, 15)


def test_every_clip_is_looked_at_by_every_encoder(checkpoint):
    found = gathered(checkpoint, ColouredSource([0, 1, 2] * 4), pictured=3)
    assert {name: len(values) for name, values in found.summaries.items()} == {"pretrained": 12, "random weights": 12}
    assert len(found.thumbs) == len(found.names) == len(found.labels) == len(found.videos) == 12
    assert {found.labels[item.row] for item in found.pictured} == {"0", "1", "2"}
    for item in found.pictured:
        looked = item.looks["pretrained"]
        assert np.allclose(looked.summary[0].numpy(), found.summaries["pretrained"][item.row])


def test_clips_that_cannot_be_read_are_named_and_the_others_shown(checkpoint):
    source = ColouredSource([0, 1] * 6)
    source.unreadable = {3}
    found = gathered(checkpoint, source)
    assert len(found.refused) == 1
    assert len(found.thumbs) == 11
    source.unreadable = set(range(12))
    with pytest.raises(UserError, match="no clip of /data could be read"):
        gathered(checkpoint, source)


def test_neighbours_are_never_of_the_video_asked_about(checkpoint):
    source = ColouredSource([0, 1] * 4)
    source.files = [f"/data/film-{i // 2}.mp4" for i in range(8)]  # two episodes each
    found = gathered(checkpoint, source, count=8)
    shown = neighbour_part(found)
    for block, item in zip(shown.split('<div class="set">')[1:], found.pictured, strict=True):
        own = Path(found.videos[item.row]).name
        alts = re.findall(r'class="line">.*?</div></div>', block, re.DOTALL)
        assert alts
        assert own in block.split('<div class="found">')[0]
        assert all(own not in part for part in alts)


def test_episodes_of_a_single_film_stand_in_and_the_page_says_so(checkpoint):
    source = ColouredSource([0, 1] * 4)
    source.files = ["/data/film.mp4"] * 8
    found = gathered(checkpoint, source, count=8)
    assert found.one_video
    assert "All clips are of one file" in neighbour_part(found)
    assert neighbour_part(gathered(checkpoint, ColouredSource([0]), count=1)) == ""


def test_all_pictures_say_how_they_were_made_and_are_well_formed(checkpoint):
    source = ColouredSource([0, 1, 2] * 4)
    source.files[:] = [f"/data/<b>{i}.mp4" for i in range(12)]
    parts = feature_parts(gathered(checkpoint, source))
    page = html_pieces.page(title="t", lede="l", body_html=parts, footer="f")
    reader = read(page)
    assert reader.silent == []
    assert page.count("<b>How.</b>") == 4
    assert "<b>0.mp4" not in page
    assert "&lt;b&gt;" in page
    for words in ("principal components", "cosine similarity", "Softmax weights", "[CLS] outputs", "head 1"):
        assert words in markup.unescape(page)
    shares = [int(x) for x in re.findall(r"(\d+)% of the variance", page)]
    assert len(shares) == 2
    assert all(0 < share <= 100 for share in shares)


def test_a_patch_of_ones_own_can_be_asked_about(checkpoint):
    found = gathered(checkpoint, ColouredSource([0, 1] * 3), count=6)
    assert "was asked for" in similarity_part(found, place=Place(1, 0, 1))
    assert "least like the clip" in similarity_part(found)
    assert similarity_part(found, place=Place(1, 0, 1)) != similarity_part(found)


def test_pictures_of_the_same_clips_are_the_same_twice(checkpoint):
    torch.manual_seed(1)
    first = feature_parts(gathered(checkpoint, ColouredSource([0, 1] * 3), count=6))
    torch.manual_seed(2)
    assert feature_parts(gathered(checkpoint, ColouredSource([0, 1] * 3), count=6)) == first


def test_a_clip_without_a_label_is_said_to_have_none_and_never_a_different_one(checkpoint):
    source = ColouredSource([0, 1] * 6)
    source.labels = np.where(np.arange(12) < 9, -1, source.labels)
    found = gathered(checkpoint, source, pictured=3)
    asked = [item for item in found.pictured if not found.labels[item.row]]
    assert asked
    shown = neighbour_part(dataclasses.replace(found, pictured=asked))
    assert "9 of the 12 clips have no label" in shown
    assert "another label" not in shown
    assert "have no label" not in neighbour_part(gathered(checkpoint, ColouredSource([0, 1] * 6)))
