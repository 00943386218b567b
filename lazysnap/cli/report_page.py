"""The page of ``lazysnap report --html``: one file with pictures, which loads nothing else. Pure."""

from collections.abc import Iterator, Sequence
from html import escape

from lazysnap.cli.goodput import CLASSES, Account
from lazysnap.cli.report import LABELS, Report, Rows, heading, length, tables

_WIDTH, _LEFT, _HEIGHT = 960, 70, 150
_COLOURS = dict(
    zip(CLASSES, ("#009e73", "#f0e442", "#56b4e9", "#d55e00", "#8c8c8c", "#0072b2", "#cc79a7"), strict=True)
)
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 1040px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin: 0; } h2 { font-size: 1.1em; margin: 1.6em 0 .3em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td { white-space: pre-wrap; }
th, td { padding: .15em .8em .15em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884; }
.n { text-align: right; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: currentColor; }
i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""
_Points = list[tuple[int, float]]


def page(report: Report) -> str:
    """Return the page."""
    rows_of = list(tables(report))
    name, times, goodput, *more = (escape(line) for line in heading(report))
    body = [
        f"<h1>{goodput}</h1><p>{'<br>'.join((name, times, *more))}</p>",
        f"<p>{''.join(_key(LABELS[one], _COLOURS[one]) for one in CLASSES)}</p>",
        _strip(report.account),
        *(_table(rows) for rows in rows_of[:2]),
        *_charts(report),
        *(_table(rows) for rows in rows_of[2:]),
    ]
    return (
        "<!doctype html><!-- lazysnap report --><html lang='en'><head><meta charset='utf-8'>"
        f"<title>lazysnap: run {escape(report.run_id[:8])}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _key(label: str, colour: str) -> str:
    return f"<i style='background:{colour}'></i>{escape(label)}"


def _table(rows: Rows) -> str:
    kinds = [" class='n'" if name.endswith(">") else "" for name in rows.columns]
    head = "".join(f"<th{kind}>{escape(name.rstrip('>'))}</th>" for name, kind in zip(rows.columns, kinds, strict=True))
    lines = ("".join(f"<td{k}>{escape(text)}</td>" for text, k in zip(row, kinds, strict=True)) for row in rows.rows)
    return f"<h2>{escape(rows.title)}</h2><table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


# ---------------------------------------------------------------- pictures


def _x(run: Account, time: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT) * (time - run.began) / max(1, run.wall), 2)


def _strip(run: Account) -> str:
    """Draw the classes over time."""
    boxes = []
    for span in run.spans:
        label = LABELS[span.of_class]
        waited = f", of it {length(span.waited)} waiting for copies" if span.waited else ""
        left, right = _x(run, span.begin), _x(run, span.end)
        boxes.append(
            f"<rect x='{left}' y='0' width='{max(0.5, right - left):.2f}' height='34' fill='{_COLOURS[span.of_class]}'>"
            f"<title>{label}: {length(span.end - span.begin)}{waited}</title></rect>"
        )
    return _svg(34, boxes, run)


def _charts(report: Report) -> Iterator[str]:
    run, bins = report.account, report.bins()
    ends, steps = [round(one["t"] * 1e6) for one in bins], [one["step"] for one in bins]
    lines = {name: _LINES[index % len(_LINES)] for index, name in enumerate(("step reached", "waiting", *run.newest))}
    behind = {name: [one["behind"][name] for one in bins] for name in run.newest}
    newest: dict[str, Sequence[float | None]] = {
        name: [None if late is None else step - late for step, late in zip(steps, lates, strict=True)]
        for name, lates in behind.items()
    }
    for title, values in (
        ("steps reached, and the newest complete one of each place", {**newest, "step reached": steps}),
        ("steps behind training", behind),
        (
            "time waited for copies, %",
            {"waiting": [None if one["step"] is None else 100 * one["waited"] for one in bins]},
        ),
    ):
        series = [(name, lines[name], _pieces(list(zip(ends, line, strict=True)))) for name, line in values.items()]
        yield _chart(title, series, run)


def _pieces(points: Sequence[tuple[int, float | None]]) -> list[_Points]:
    """Return the parts of a line where it has values."""
    pieces: list[_Points] = [[]]
    for at, value in points:
        if value is not None:
            pieces[-1].append((at, value))
        elif pieces[-1]:
            pieces.append([])
    return pieces


def _chart(title: str, series: Sequence[tuple[str, str, list[_Points]]], run: Account) -> str:
    top = max((value for _, _, lines in series for line in lines for _, value in line), default=0.0) or 1.0
    drawn = []
    for share in (0, 0.5, 1):
        at = f"x='{_LEFT - 8}' y='{_HEIGHT - share * (_HEIGHT - 12)}'"
        drawn.append(f"<text {at} text-anchor='end'>{round(share * top, 1):g}</text>")
    for _, colour, lines in series:
        for line in lines:
            points = " ".join(f"{_x(run, at)},{_HEIGHT - value / top * (_HEIGHT - 8):.1f}" for at, value in line)
            drawn.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
    keys = "".join(_key(label, colour) for label, colour, _ in series)
    return f"<h2>{escape(title)}</h2><p>{keys}</p>{_svg(_HEIGHT, drawn, run)}"


def _svg(height: int, drawn: Sequence[str], run: Account) -> str:
    """Draw on an axis of time."""
    axis = [f"<path d='M{_LEFT} {height + 1}H{_WIDTH}' stroke='currentColor' fill='none'/>"]
    for part in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        at = f"x='{_LEFT + (_WIDTH - _LEFT) * part / 4}' y='{height + 16}'"
        axis.append(f"<text {at} text-anchor='{anchor}'>{length(run.wall * part // 4)}</text>")
    return f"<svg viewBox='0 0 {_WIDTH} {height + 20}' role='img'>{''.join((*axis, *drawn))}</svg>"
