"""docs/metrics.md lists every metric of the table. To write its list anew: python -m tests.metrics.test_page"""

import re
from itertools import groupby
from pathlib import Path

from pulsesync import metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- the table of pulsesync.metrics; a test compares it -->\n", "<!-- end of the table -->\n"


def listed() -> str:
    lines = []
    for section, group in groupby(metrics.INSTRUMENTS, key=lambda one: one.section):
        lines += ["", f"### {section[0].upper()}{section[1:]}", ""]
        lines += ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
        for one in group:
            labels = ", ".join(f"`{label}`" for label in one.labels) or "–"
            lines.append(f"| `{one.name}` | {one.kind} | {labels} | {one.help} |")
    return "\n".join([*lines, "", ""])


def test_the_page_lists_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == listed(), "out of date: python -m tests.metrics.test_page"


def test_no_page_names_a_metric_that_does_not_exist() -> None:
    names = {one.name for one in metrics.INSTRUMENTS} | {
        f"{one.name}_{part}" for one in metrics.INSTRUMENTS for part in ("bucket", "sum", "count")
    }
    for page in (*PAGE.parent.rglob("*.md"), PAGE.parents[1] / "README.md"):
        found = re.findall(r"\b(?<!/)pulse_\w+(?:_total|_seconds|_bytes|_versions|_version)\b", page.read_text("utf-8"))
        assert set(found) <= names, page


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + listed() + END + rest.partition(END)[2], encoding="utf-8")
