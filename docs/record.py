"""Record what a command shows on a terminal, as a moving picture: ``python docs/record.py OUT.svg COMMAND...``.

It begins with all lines. Then they appear when they appeared in the run; a pause of more than a second and a half is
cut to that. The picture needs no script and no network. `make record` makes docs/demo.svg of `lazysnap demo`.
"""

import os
import pty
import sys
import time
from html import escape

from rich.text import Text

COLUMNS, LEFT, TOP, LINE, CHARACTER = 92, 16, 44, 17, 7.83
LONGEST_S, LAST_S = 1.5, 6.0
COLOURS = {"color(1)": "#ff6b6b", "color(2)": "#69db7c", "color(3)": "#ffd43b"}
PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>{title}</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #e9ecef; white-space: pre; }}
.l {{ animation: show {total:.1f}s linear -{full:.1f}s infinite; }}
@media (prefers-reduced-motion: reduce) {{ .l {{ animation: none; }} }}
{frames}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#1b1f24"/>
<circle cx="20" cy="18" r="6" fill="#ff5f56"/><circle cx="40" cy="18" r="6" fill="#ffbd2e"/>
<circle cx="60" cy="18" r="6" fill="#27c93f"/>
{lines}
</svg>
"""


def run(command: list[str]) -> list[tuple[float, Text]]:
    """Run it in a terminal; its lines, and when each was there. Raises: SystemExit, if it failed."""
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    name = " ".join([os.path.basename(command[0]), *command[1:]])
    shown = [(0.0, Text(f"$ {name}", "bold"))]
    began, held = time.monotonic(), b""

    def read(handle: int) -> bytes:
        nonlocal held
        data = os.read(handle, 1 << 16)
        *whole, held = (held + data).split(b"\n")
        shown.extend((time.monotonic() - began, Text.from_ansi(line.decode().rstrip("\r"))) for line in whole)
        return data

    code = os.waitstatus_to_exitcode(pty.spawn(command, read))
    if code:
        raise SystemExit(f"{command} ended with {code}")
    return shown


def spans(text: Text) -> str:
    """One line as SVG."""
    pieces = []
    for piece in text.divide(sorted({edge for span in text.spans for edge in (span.start, span.end)})):
        styles = [str(span.style) for span in piece.spans] + [str(piece.style)]
        bold = ' font-weight="bold"' if any("bold" in style for style in styles) else ""
        colour = next((f' fill="{hexa}"' for name, hexa in COLOURS.items() if any(name in one for one in styles)), "")
        pieces.append(f"<tspan{bold}{colour}>{escape(piece.plain)}</tspan>")
    return "".join(pieces)


def picture(title: str, shown: list[tuple[float, Text]]) -> str:
    """All lines as one moving picture."""
    at, before, times = 0.3, 0.0, []
    for seconds, _ in shown:
        at += min(LONGEST_S, seconds - before)
        before = seconds
        times.append(at)
    total = at + LAST_S
    frames = [
        f"@keyframes l{number} {{ 0%, {100 * at / total:.2f}% {{ opacity: 0; }} "
        f"{100 * at / total + 0.01:.2f}%, 100% {{ opacity: 1; }} }} .l{number} {{ animation-name: l{number}; }}"
        for number, at in enumerate(times)
    ]
    lines = [
        f'<text class="l l{number}" x="{LEFT}" y="{TOP + LINE * number}">{spans(text)}</text>'
        for number, (_, text) in enumerate(shown)
    ]
    size = {"width": round(2 * LEFT + CHARACTER * COLUMNS), "height": TOP + LINE * len(shown)}
    # It begins with the whole picture, which is also what a reader without animations sees.
    times_s = {"total": total, "full": at + 0.1}
    return PAGE.format(title=escape(title), **times_s, frames="\n".join(frames), lines="\n".join(lines), **size)


if __name__ == "__main__":
    out, *words = sys.argv[1:]
    text = picture(" ".join(words), run(words))
    with open(out, "w") as file:
        file.write(text)
