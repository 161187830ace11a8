"""Save the output of a benchmark: its text as a page, and its JSON as a data file to which the page links.

    python -m benchmarks codec --rounds 7 | python -m benchmarks.harness.save codec_aarch64_2026-11-15

writes results/codec_aarch64_2026-11-15.md and results/data/codec_aarch64_2026-11-15.json, and passes the output on to
the terminal. Every line that is a JSON object moves to the data file; several objects become a list. Hardware, command
and conclusions are added to the page by hand; a page that exists is not overwritten.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
WIDTH = 120


def split(lines: Iterable[str]) -> tuple[list[str], list[Any]]:
    """Split printed lines into those for people and the JSON objects."""
    text, objects = [], []
    for line in lines:
        if line.startswith("{"):
            objects.append(json.loads(line))
        else:
            text.append(line)
    return text, objects


def pretty(value: Any, indent: str = "") -> str:
    """Return JSON that is short and still readable in a diff: a value that fits in one line has one line."""
    line = json.dumps(value)
    inner = indent + " "
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        members = [f"{inner}{json.dumps(key)}: {pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(members) + f"\n{indent}}}"
    if any(isinstance(item, dict | list | str) for item in value):
        return "[\n" + ",\n".join(inner + pretty(item, inner) for item in value) + f"\n{indent}]"
    return f"[\n{textwrap.fill(line[1:-1], WIDTH, initial_indent=inner, subsequent_indent=inner)}\n{indent}]"


def write(path: Path, objects: list[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(pretty(objects[0] if len(objects) == 1 else objects) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="theme, hardware and date, as in codec_aarch64_2026-11-15")
    name = parser.parse_args().name
    page, data = RESULTS / f"{name}.md", RESULTS / "data" / f"{name}.json"
    if page.exists():
        parser.error(f"{page} exists; choose another name or delete it first")
    lines = []
    for line in sys.stdin:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))
    text, objects = split(lines)
    link = []
    if objects:
        write(data, objects)
        link = ["", f"The raw figures: [{data.name}](data/{data.name})."]
    page.write_text("\n".join([f"# {name}", "", *text, *link]).rstrip() + "\n")


if __name__ == "__main__":
    main()
