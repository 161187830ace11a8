"""docs/fleet.md, line by line: its Python is run, and its commands print what the page shows."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import pulse

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_commands(text: str) -> None:
    """Run each line after a `$`, and compare what it prints with the lines that follow it."""
    for piece in text.split("$ ")[1:]:
        command, _, shown = piece.partition("\n")
        program, *arguments = command.split()
        assert program == "pulse"
        done = pulse(*arguments)
        assert (done.code, done.out, done.err) == (0, shown, ""), command


def test_every_line_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert {language for language, _ in blocks} == {"python", "console", "text"}
    for language, text in blocks:
        if language == "console":
            run_commands(text)
        elif language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
    assert names["worker"].version == 5
