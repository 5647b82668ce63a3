from __future__ import annotations

import html.parser
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marey.core.tokens import TokenGroup, grid_positions, patchify
from marey.evaluation import page as html_pieces
from marey.evaluation.charts import Line, line_chart, ticks
from marey.evaluation.demo_facts import headline, headline_without_labels, pick, verdict
from marey.evaluation.demo_page import Neighbours, Picture, Story, render
from marey.evaluation.future_page import Film, Future
from marey.evaluation.measure import EncoderScores, Gain, ProbeResult, Score
from marey.evaluation.neighbours import nearest_clips
from marey.evaluation.pictures import data_uri, film, kept_patches, plate
from marey.evaluation.seen import Seen

VOID = {"source", "meta", "img", "link", "br", "hr", "input", "line", "circle", "polyline"}


class Reader(html.parser.HTMLParser):
    """Checks that tags nest, and collects what a page would load or leave unsaid."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.silent: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.loads += [value for name, value in values.items() if name in ("src", "href", "srcset", "data") and value]
        if tag == "img" and not values.get("alt"):
            self.silent.append(tag)
        if values.get("role") == "img" and not values.get("aria-label"):
            self.silent.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def score(right: int) -> Score:
    return Score(right, 100, right / 100 - 0.05, right / 100 + 0.05)


def result(pretrained: int, random: int, gain: Gain) -> ProbeResult:
    encoders = {
        name: EncoderScores(score(right), score(right), 0.1, True)
        for name, right in (("pretrained", pretrained), ("random weights", random))
    }
    return ProbeResult("digit", ["0", "1"], 400, 100, 400, 100, score(50), encoders, {"linear": gain, "knn": gain})


def story(**changes) -> Story:
    frames = np.random.default_rng(0).integers(0, 255, size=(4, 16, 16, 3), dtype=np.uint8)
    view = np.concatenate([frames, np.full((4, 16, 16, 1), 255, np.uint8)], axis=-1)
    clip = Picture(frames, "3, left", "3")
    values = {
        "title": "It learned <b> & more",
        "lede": "A small encoder.",
        "clips": [clip, clip],
        "seen": Seen(view, view, [view], 16, 4, 8, 2),
        "drop_rate": 0.8,
        "metrics": {
            "step": [1.0, 5.0, 10.0],
            "train/loss": [0.5, math.nan, 0.3],
            "train/invariance": [0.1, 0.1, 0.1],
            "train/sigreg": [20.0, 15.0, 10.0],
            "train/embedding_rank": [5.0, 9.0, 20.0],
        },
        "sigreg_weight": 0.02,
        "probes": [result(80, 40, Gain(0.4, 0.3, 0.5))],
        "neighbours": [Neighbours(clip, {"pretrained": [clip, Picture(frames, "4, up", "4")]})],
        "receipt": {"experiment": "demo", "path": "/a/<b>"},
        "commands": [("look & see", "marey inspect 'a b'")],
    }
    return Story(**{**values, **changes})


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_a_page_loads_nothing_and_runs_nothing():
    page = render(story())
    reader = read(page)
    assert all(load.startswith(("data:image/", "#")) for load in reader.loads)
    assert "script" not in reader.tags
    for address in re.findall(r"url\(([^)]*)\)", page):
        assert address.startswith("data:image/")
    assert "@import" not in page
    assert not re.search(r"https?://", page)


def test_everything_that_is_seen_can_be_heard():
    page = render(story())
    assert read(page).silent == []
    assert '<html lang="en">' in page
    assert page.count("<h1>") == 1
    assert 'scope="col"' in page
    assert 'scope="row"' in page


def test_light_and_dark_name_the_same_colours():
    page = render(story())
    light, dark = (set(re.findall(r"--([\w-]+):#", block)) for block in re.findall(r":root\{([^}]*)\}", page))
    assert light == dark
    assert set(re.findall(r"var\(--([\w-]+)\)", page)) <= light | {"frames"}
    assert "prefers-reduced-motion" in page


def test_text_is_text_and_never_markup():
    page = render(story())
    assert "It learned &lt;b&gt; &amp; more" in page
    assert "/a/&lt;b&gt;" in page
    assert "look &amp; see" in page


def test_parts_that_were_not_measured_are_left_out():
    page = render(story(probes=[], neighbours=[]))
    read(page)
    assert "A look inside" not in page
    assert "A look inside" in render(story(inside_html="<p>pictures</p>"))
    assert "What it learned" not in page
    assert "What it finds alike" not in page


def test_neighbours_of_the_same_label_are_marked():
    page = render(story())
    assert page.count('class="same"') == 1
    assert "3 ✓" in page


def a_future(prediction: float = 0.02) -> Future:
    return Future(
        films=[Film("data:image/gif;base64,AA", "data:image/jpeg;base64,BB", "clip <1>")],
        errors={"prediction": prediction, "still image": 0.04, "copy last": 0.01},
        by_frame={"prediction": [0.01, 0.03], "still image": [0.02, 0.06]},
        clips=8,
        known=4,
        predicted=12,
        held_out=True,
        steps=240,
        seconds=61.0,
        padding=0.0,
        metrics={"step": [1.0, 240.0], "train/loss": [1.1, 0.2]},
    )


def test_a_predicted_future_stands_beside_what_followed_with_its_errors():
    page = render(story(future=a_future()))
    reader = read(page)
    assert all(load.startswith(("data:image/", "#")) for load in reader.loads)
    assert reader.silent == []
    assert "What it expects to happen next" in page
    assert "clip &lt;1&gt;" in page
    assert "0.50" in page
    assert "0% of what the heavy layers saw was padding" in page
    assert "that training never saw" in page
    assert page.index("Error of each predicted frame") > page.index("What it expects to happen next")
    assert "What it expects" not in render(story())


def test_the_errors_decide_what_is_said_of_a_future():
    assert "0.50 of the error of a still image" in verdict(a_future())
    assert "no better than a still image yet (1.25" in verdict(a_future(0.05))


def test_the_page_knows_its_own():
    assert html_pieces.is_ours(render(story()))
    assert not html_pieces.is_ours("<html><body>mine</body></html>")


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (Gain(0.4, 0.3, 0.5), "it learned to tell digits apart: 80% of held-out clips, against 40%"),
        (Gain(0.0, -0.1, 0.1), "no certain gain"),
        (Gain(-0.2, -0.3, -0.1), "worse"),
    ],
)
def test_the_headline_says_what_the_interval_allows(gain, words):
    assert words in headline(result(80, 40, gain), what="digits")


def test_a_collapse_is_the_headline_where_there_are_no_labels():
    assert "it collapsed" in headline_without_labels(3, rank=1.2, width=64)
    assert "uses 40 of 64 dimensions" in headline_without_labels(1, rank=40.4, width=64)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_are_round_few_and_cover_the_range(low, span):
    found = ticks(low, low + span)
    slack = 1e-6 * max(1e-3, abs(low), abs(low + span))
    assert found[0] <= low + slack
    assert found[-1] >= low + span - slack
    assert 2 <= len(found) <= 13
    assert all(a < b for a, b in pairwise(found))


def test_a_chart_places_points_and_breaks_at_gaps():
    lines = [Line("a", [0, 1, 2, 3, 4], [0, 10, math.nan, 5, 10])]
    svg = line_chart(lines, title="t<", x_label="x", y_label="y", from_zero=True)
    tree = ElementTree.fromstring(svg)
    curves = [node.attrib["points"] for node in tree.iter() if node.tag == "polyline"]
    assert len(curves) == 2
    (x0, y0), (x1, y1) = (tuple(map(float, point.split(","))) for point in curves[0].split())
    assert x0 < x1
    assert y0 > y1  # SVG's y points down
    assert tree.attrib["aria-label"] == "t<: a from 0 to 10"


def test_a_chart_of_one_point_or_a_level_line_has_axes_all_the_same():
    for first in (0, 1, 4, 1000):  # whole numbers, whatever room is left around a single one
        for y in ([3.0], [3.0, 3.0], [0.0]):
            x = range(first, first + len(y))
            ElementTree.fromstring(line_chart([Line("a", x, y)], title="t", x_label="x", y_label="y"))
    level = ElementTree.fromstring(line_chart([Line("a", [1, 3], [0, 0])], title="t", x_label="x", y_label="y"))
    told = [node.text for node in level.iter() if node.tag == "text"]
    assert not any(text and text.startswith("-") for text in told), "what is never below nothing has no room there"
    assert [text for text in told if text in ("1", "1.5", "2", "2.5", "3")].count("1.5") == 0, "there is no half step"
    with pytest.raises(ValueError, match="no finite point"):
        line_chart([Line("a", [1], [math.nan])], title="t", x_label="x", y_label="y")


def test_kept_patches_lie_where_they_were_cut():
    video = torch.randint(1, 256, (1, 3, 4, 16, 24), dtype=torch.uint8)[..., :16]
    patches, positions = patchify(video, patch=8, tubelet=2), grid_positions((2, 2, 2)).unsqueeze(0)
    keep = torch.tensor([1, 6])
    group = TokenGroup(patches[:, keep], positions[:, keep])
    picture = kept_patches(group, 0, frames=4, size=16, patch=8, tubelet=2)
    whole = video[0].permute(1, 2, 3, 0).numpy()
    shown = picture[..., 3] == 255
    assert shown.sum() == 2 * 2 * 8 * 8
    assert np.array_equal(picture[..., :3][shown], whole[shown])
    assert shown[0, 0, 8]
    assert shown[2, 8, 0]
    assert not picture[~shown].any()


def test_a_film_runs_left_to_right_and_a_plate_holds_every_moment():
    frames = np.zeros((3, 8, 8, 3), np.uint8)
    for t in range(3):
        frames[t, 2, 2 * t] = 200
    strip, exposed = film(frames), plate(frames)
    assert strip.shape == (8, 24, 3)
    assert [strip[2, 8 * t + 2 * t, 0] for t in range(3)] == [200] * 3
    assert np.flatnonzero(exposed[2, :, 0]).tolist() == [0, 2, 4]
    assert data_uri(strip).startswith("data:image/jpeg;base64,")
    assert data_uri(np.zeros((2, 2, 4), np.uint8)).startswith("data:image/png;base64,")


def test_neighbours_are_nearest_first_and_never_of_the_same_video():
    base = np.array([[1, 0], [0.9, 0.1], [0, 1], [-1, 0]], np.float32)
    assert nearest_clips(base[:1], base, count=3).tolist() == [[0, 1, 2]]
    found = nearest_clips(base[:1], base, count=3, query_videos=["a"], base_videos=["a", "b", "a", "c"])
    assert found.tolist() == [[1, 3, -1]]


def test_clips_for_show_are_drawn_by_the_seed_and_differ_in_label():
    labels = ["a"] * 50 + ["b", "c"]
    rows = pick(labels, count=3, seed=0, purpose="p")
    assert sorted(labels[row] for row in rows) == ["a", "b", "c"]
    assert rows == pick(labels, count=3, seed=0, purpose="p")
    assert rows != pick(labels, count=3, seed=1, purpose="p")
    assert len(set(pick(labels, count=60, seed=0, purpose="p"))) == 52
