"""The fenced blocks of README.md and of the pages of docs/ and lab/docs/, and the command lines in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```[ ]*$", re.DOTALL | re.MULTILINE)
SHELL = ("bash", "sh", "console")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class CommandLine:
    """A command of a shell block, as words, and what the page shows that it prints."""

    words: tuple[str, ...]
    shown: str | None = None  # None where the page shows no output

    @property
    def program(self) -> str:
        """The program, with the package that a Python runs by -m."""
        if self.words[1:2] == ("-m",):
            return f"{self.words[0]} -m {self.words[2].partition('.')[0]}"
        return self.words[0]


def pages() -> list[str]:
    """README.md and every page of docs/ and lab/docs/."""
    folders = (ROOT / "docs", ROOT / "lab" / "docs")
    found = sorted(path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.md"))
    return ["README.md", *found]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(page, 1 + text.count("\n", 0, found.start()), found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M))
        for found in FENCE.finditer(text)
    ]


def command_lines(block: Block) -> Iterator[CommandLine]:
    """The commands of a shell block. In a console block they follow a `$`, and what they print follows them."""
    text = block.text.replace("\\\n", " ")
    if block.language != "console":
        for line in text.splitlines():
            if words := _words(line):
                yield CommandLine(words)
        return
    for piece in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = piece.partition("\n")
        if words := _words(line):
            yield CommandLine(words, shown)


def _words(line: str) -> tuple[str, ...]:
    """The words of a command line, without a comment, variables in front of it, and an & at its end."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return tuple(words[:-1] if words[-1:] == ["&"] else words)
