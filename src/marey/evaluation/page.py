"""One self-contained HTML page: no network, no script; light and dark, phone and desk, readable by ear.

The pieces here return HTML; text given to them is escaped unless a parameter's name says ``html``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from marey.evaluation.page_style import CSS

GENERATOR = "marey"
_PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="$generator">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$css</style>
</head>
<body>
<a class="skip" href="#main">Skip to the result</a>
<header>
<p class="mark">Marey</p>
<h1>$title</h1>
<p class="lede">$lede</p>
</header>
<main id="main">
$body
</main>
<footer>$footer</footer>
</body>
</html>
"""
)


def page(*, title: str, lede: str, body_html: str, footer: str) -> str:
    """The whole document."""
    return _PAGE.substitute(
        generator=GENERATOR,
        title=escape(title),
        lede=escape(lede),
        css=CSS,
        body=body_html,
        footer=escape(footer),
    )


def is_ours(text: str) -> bool:
    """Whether a page was written by this module."""
    return f'<meta name="generator" content="{GENERATOR}">' in text[:2000]


def section(heading: str, *, body_html: str, intro: str = "") -> str:
    """A headed part of the page."""
    lead = f"<p>{escape(intro)}</p>" if intro else ""
    return f"<section><h2>{escape(heading)}</h2>{lead}{body_html}</section>"


def part(heading: str, *, body_html: str, intro: str = "") -> str:
    """A headed part of a section."""
    lead = f"<p>{escape(intro)}</p>" if intro else ""
    return f'<div class="part"><h3>{escape(heading)}</h3>{lead}{body_html}</div>'


def figure(*, body_html: str, caption: str, kind: str = "") -> str:
    """A picture or chart with its caption."""
    css = f' class="{escape(kind, quote=True)}"' if kind else ""
    return f"<figure{css}>{body_html}<figcaption>{escape(caption)}</figcaption></figure>"


def row(items_html: Sequence[str], *, kind: str) -> str:
    """Figures side by side, as many as fit."""
    return f'<div class="{escape(kind, quote=True)}">{"".join(items_html)}</div>'


def image(uri: str, *, alt: str, kind: str = "") -> str:
    """A still picture."""
    return f'<img class="{escape(kind, quote=True)}" src="{uri}" alt="{escape(alt, quote=True)}">'


def animated(uri: str, *, still: str, alt: str) -> str:
    """A picture that plays by itself; ``still`` in its place for readers who ask for less motion."""
    return (
        f'<picture><source media="(prefers-reduced-motion: reduce)" srcset="{still}">'
        f'<img src="{uri}" alt="{escape(alt, quote=True)}"></picture>'
    )


def moving(uri: str, *, frames: int, alt: str) -> str:
    """A film strip played in place, frame by frame; still for readers who ask for less motion."""
    style = f"background-image:url({uri});background-size:{frames * 100}% 100%;--frames:{frames}"
    return f'<div class="moving" role="img" aria-label="{escape(alt, quote=True)}" style="{style}"></div>'


def table(head: Sequence[str], rows_html: Sequence[Sequence[str]], *, caption: str) -> str:
    """A table whose first column names the rows; its cells are HTML."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>'
        for cells in rows_html
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def facts(pairs: Mapping[str, str]) -> str:
    """Names and values."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f"<dl>{items}</dl>"


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """Name, figure and a remark each, at a glance."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(figure_)}"
        + (f"<small>{escape(remark)}</small>" if remark else "")
        + "</dd></div>"
        for name, figure_, remark in items
    )
    return f'<dl class="tiles">{cells}</dl>'


def folded(summary: str, *, body_html: str) -> str:
    """A part that opens when asked for."""
    return f"<details><summary>{escape(summary)}</summary>{body_html}</details>"


def listing(text: str) -> str:
    """Text as it is, letter by letter."""
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def note(text: str) -> str:
    """What is missing, or doubtful."""
    return f'<p class="note">{escape(text)}</p>'


def how(text: str) -> str:
    """How the pictures above were computed."""
    return f'<p class="how"><b>How.</b> {escape(text)}</p>'


def share_cell(share: float, *, words: str) -> str:
    """A share of a whole, as text and as a bar."""
    width = min(1.0, max(0.0, share))
    return f'{escape(words)}<span class="share" aria-hidden="true"><i style="width:{width:.1%}"></i></span>'


def commands(lines: Sequence[tuple[str, str]]) -> str:
    """Shell commands, each after a remark."""
    text = "\n\n".join(f"<i># {escape(remark)}</i>\n{escape(command)}" for remark, command in lines)
    return f'<pre tabindex="0"><code>{text}</code></pre>'


def accuracy_cell(share: float, low: float, high: float, *, colour: str) -> str:
    """A share with its 95% interval, as text and as a mark on a 0-100% line."""
    bar = (
        f'<span class="interval" aria-hidden="true"><i style="left:{low:.1%};width:{high - low:.1%};'
        f'background:var(--{colour})"></i><b style="left:{share:.1%};background:var(--{colour})"></b></span>'
    )
    return f"<strong>{share:.1%}</strong> <small>{low:.1%} to {high:.1%}</small>{bar}"
