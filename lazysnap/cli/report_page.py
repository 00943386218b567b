"""The page of ``lazysnap report --html``: one file with pictures, which loads nothing else. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lazysnap.cli.report import LABELS, TableRows, heading, length, notes, tables
from lazysnap.resolver import short_id

_WIDTH = 960
_LEFT = 70
_HEIGHT = 150
_COLOURS = {
    "productive": "#009e73",
    "waiting": "#f0e442",
    "setup": "#56b4e9",
    "lost": "#d55e00",
    "down": "#8c8c8c",
    "restarting": "#0072b2",
    "draining": "#cc79a7",
}
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 1040px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin: 0; } h2 { font-size: 1.1em; margin: 1.6em 0 .3em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 1.6em; }
td { white-space: pre-wrap; }
th, td { padding: .15em .8em .15em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884; }
.n { text-align: right; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: currentColor; }
i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""
_Points = list[tuple[float, float]]
"""Times, and a value at each."""
_Values = Sequence[float | None]


def page(figures: dict[str, Any]) -> str:
    """Return the page for the figures of ``report --json``."""
    name, times, goodput, *further = map(escape, heading(figures))
    keys = ""
    for kind, label in LABELS.items():
        keys += _key(label, _COLOURS[kind])
    body = [f"<h1>{goodput}</h1><p>{'<br>'.join((name, times, *further))}</p><p>{keys}</p>", _strip(figures)]
    body += map(_table, tables(figures))
    body += _charts(figures)
    lines = list(map(escape, notes(figures)))
    if lines:
        body.append(f"<h2>notes</h2><p>{'<br>'.join(lines)}</p>")
    return (
        "<!doctype html><!-- lazysnap report --><html lang='en'><head><meta charset='utf-8'>"
        f"<title>lazysnap: run {escape(short_id(figures['run_id']))}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _key(label: str, colour: str) -> str:
    return f"<i style='background:{colour}'></i>{escape(label)}"


def _table(table: TableRows) -> str:
    heads = [column.rstrip("<>") for column in table.columns]
    html = _row("th", heads, table.columns)
    for row in table.rows:
        html += _row("td", row, table.columns)
    return f"<table>{html}</table>"


def _row(tag: str, texts: Sequence[str], columns: Sequence[str]) -> str:
    """Return the HTML of a row. A column that ends in ``>`` is of numbers."""
    cells = ""
    for text, column in zip(texts, columns, strict=True):
        attributes = ""
        if column.endswith(">"):
            attributes = " class='n'"
        cells += f"<{tag}{attributes}>{escape(text)}</{tag}>"
    return f"<tr>{cells}</tr>"


# ---------------------------------------------------------------- pictures


def _x(figures: dict[str, Any], moment: float) -> float:
    share: float = (moment - figures["began"]) / max(1e-6, figures["wall_s"])
    return round(_LEFT + (_WIDTH - _LEFT) * share, 2)


def _strip(figures: dict[str, Any]) -> str:
    """Draw the classes over time."""
    boxes = []
    for span in figures["spans"]:
        text = f"{LABELS[span['class']]}: {length(span['ended'] - span['began'])}"
        if span["waited_s"]:
            text += f", including {length(span['waited_s'])} waiting for copies"
        x = _x(figures, span["began"])
        width = max(0.5, _x(figures, span["ended"]) - x)
        boxes.append(
            f"<rect x='{x}' y='0' width='{width:.2f}' height='34' fill='{_COLOURS[span['class']]}'>"
            f"<title>{text}</title></rect>"
        )
    return _svg(34, boxes, figures)


def _charts(figures: dict[str, Any]) -> Iterator[str]:
    steps = []
    waited: list[float | None] = []
    behind: dict[str, list[float | None]] = defaultdict(list)
    for point in figures["over_time"]:
        steps.append(point["step"])
        waited_percent = None
        if point["step"] is not None:
            waited_percent = 100 * point["waited"]
        waited.append(waited_percent)
        for source, lag in point["behind"].items():
            behind[source].append(lag)
    yield _chart("step reached", {"step": steps}, figures)
    yield _chart("how many steps the newest complete one is behind", behind, figures)
    yield _chart("time waited for copies, %", {"waiting": waited}, figures)


def _chart(title: str, series: Mapping[str, _Values], figures: dict[str, Any]) -> str:
    top = 0.0
    for values in series.values():
        for value in values:
            top = max(top, value or 0.0)
    if not top:
        top = 1.0
    drawn = []
    for share in (0, 0.5, 1):
        at = f"x='{_LEFT - 8}' y='{_HEIGHT - share * (_HEIGHT - 12)}'"
        drawn.append(f"<text {at} text-anchor='end'>{round(share * top, 1):g}</text>")
    keys = []
    for index, (label, values) in enumerate(series.items()):
        colour = _LINES[index % len(_LINES)]
        keys.append(_key(label, colour))
        for line in _pieces(values, figures):
            points = [f"{_x(figures, at)},{_HEIGHT - value / top * (_HEIGHT - 8):.1f}" for at, value in line]
            drawn.append(f"<polyline points='{' '.join(points)}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
    return f"<h2>{escape(title)}</h2><p>{''.join(keys)}</p>{_svg(_HEIGHT, drawn, figures)}"


def _pieces(values: _Values, figures: dict[str, Any]) -> list[_Points]:
    """Return the parts of a line where it has values."""
    pieces: list[_Points] = [[]]
    for point, value in zip(figures["over_time"], values, strict=True):
        if value is not None:
            pieces[-1].append((point["t"], value))
        elif pieces[-1]:
            pieces.append([])
    return pieces


def _svg(height: int, drawn: Sequence[str], figures: dict[str, Any]) -> str:
    """Draw on an axis of time."""
    axis = [f"<path d='M{_LEFT} {height + 1}H{_WIDTH}' stroke='currentColor' fill='none'/>"]
    for part, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        at = f"x='{_LEFT + (_WIDTH - _LEFT) * part / 4}' y='{height + 16}'"
        axis.append(f"<text {at} text-anchor='{anchor}'>{length(figures['wall_s'] * part / 4)}</text>")
    return f"<svg viewBox='0 0 {_WIDTH} {height + 20}' role='img'>{''.join((*axis, *drawn))}</svg>"
