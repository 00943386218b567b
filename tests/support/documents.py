"""The pages of the documentation: their blocks of code, their headings and their links."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_ANCHOR_DEPTH = 3
"""``myst_heading_anchors`` of docs/conf.py."""


@dataclass(frozen=True)
class Block:
    """A fenced block. ``key``: the page, the anchor of the heading above it, and a number if it is not the first there
    in its language.
    """

    key: str
    language: str
    code: str

    def __str__(self) -> str:
        return self.key


def anchor(title: str) -> str:
    """Return the anchor that myst and GitHub give to a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower().replace(" ", "-"))


def headings(page: Path) -> list[tuple[int, str]]:
    """Return depth and title of each heading of a page."""
    return [(len(depth), title) for depth, title in re.findall(r"^(#+) (.+)$", prose(page), flags=re.M)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that links can name."""
    return {anchor(title) for depth, title in headings(page) if depth <= _ANCHOR_DEPTH}


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    found, heading, counts = [], "", {}
    for title, language, code in re.findall(
        r"^#+ ([^\n]+)$|^ *```([^\n`]*)\n(.*?)^ *```$", page.read_text(), flags=re.M | re.S
    ):
        if title:
            heading = anchor(title)
            continue
        number = counts[heading, language] = counts.get((heading, language), 0) + 1
        key = f"{page.name}#{heading}" + (f"-{number}" if number > 1 else "")
        found.append(Block(key, language, textwrap.dedent(code)))
    return found


def all_blocks(language: str) -> list[Block]:
    """Return the blocks in that language of all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def prose(page: Path) -> str:
    """Return the text of a page without its blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)


def inline_commands(program: str) -> list[tuple[str, str]]:
    """Return page and text of each call of that program within the prose, on one line."""
    spans = ((page.name, " ".join(text.split())) for page in PAGES for text in re.findall(r"`([^`]+)`", prose(page)))
    return [(name, text) for name, text in spans if re.match(rf"{program} [a-z]", text)]


def command_lines() -> list[tuple[str, str]]:
    """Return key and line of each command that a page shows in a block, continued lines joined, without comments."""
    found = []
    for language in ("bash", ""):
        for block in all_blocks(language):
            lines = re.sub(r"\\\n\s*", "", block.code).splitlines()
            if not language:
                lines = [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?lazysnap \w", line)]
            for line in lines:
                if command := re.sub(r"(^|\s+)# .*$|\s+#$", "", line).strip():
                    found.append((block.key, command))
    return found


def links(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))
