"""A recording as one self-contained HTML page: no scripts, no fonts, no network.

write_report(Recording.read("study.jsonl"), Path("study.html"), "SmolLM2, GRPO at 3e-6")
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pulsesync_lab.charts import figure
from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report import findings
from pulsesync_lab.study.report.panels import Plot, plots
from pulsesync_lab.study.report.tables import figures

TENSORS = 12  # at either end
_CODE = re.compile(r"`(\w+)`")

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; background: #fff; max-width: 820px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0 .8rem; } a { color: #1d4ed8; } svg { width: 100%; height: auto; }
nav ul { columns: 2; padding-left: 1.2rem; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e5e7eb; vertical-align: top;
  overflow-wrap: anywhere; }
th { white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
footer { margin-top: 3rem; color: #6b7280; font-size: .85rem; }
@media print { h2, figure { break-inside: avoid; } } figure { margin: 0; }
"""


def write_report(recording: Recording, path: Path, title: str, lr: float | None = None) -> None:
    """Write the page. lr: the learning rate, for the theory's curve, if the recording does not have it."""
    Path(path).write_text(page(recording, title, lr), encoding="utf-8")


def page(recording: Recording, title: str, lr: float | None = None) -> str:
    """The page as text; every name and fact in it is escaped."""
    shown = plots(recording, lr)
    sections = [("summary", "Summary"), *((plot.anchor, plot.chart.title) for plot in shown), ("tensors", "Tensors")]
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style>\n</head>\n<body>",
            f"<header><h1>{escape(title)}</h1>\n<p>{escape(_said(recording))}</p></header>",
            _contents(sections),
            f'<main>\n<h2 id="summary">Summary</h2>\n{_pairs(figures(recording))}',
            _known(recording),
            *(_figure(plot) for plot in shown),
            f'<h2 id="tensors">Tensors</h2>\n{_tensors(recording)}',
            "</main>",
            "<footer>Shares are of the compared weights. Written by pulse study.</footer>",
            "</body>\n</html>\n",
        ]
    )


def _said(recording: Recording) -> str:
    """The recording in a sentence."""
    values = findings.sparsity(recording)
    if not values:
        return "Nothing was recorded."
    mean, low = sum(values) / len(values), min(values)
    return (
        f"In {len(values)} steps, {mean:.2%} of {recording.size:,} {recording.header.dtype} weights were left as they "
        f"were by a step on average, and {low:.2%} in the worst."
    )


def _contents(sections: Iterable[tuple[str, str]]) -> str:
    links = "\n".join(f'<li><a href="#{escape(anchor)}">{escape(name)}</a></li>' for anchor, name in sections)
    return f'<nav aria-label="Contents"><ul>\n{links}\n</ul></nav>'


def _known(recording: Recording) -> str:
    """The facts in the recording."""
    facts: Mapping[str, Any] = recording.header.facts
    if not facts:
        return ""
    return f"<h2>Facts about the run</h2>\n{_pairs({name: str(value) for name, value in facts.items()})}"


def _figure(plot: Plot) -> str:
    drawn = figure(plot.chart, plot.about.replace("`", ""))
    about = _CODE.sub(r"<code>\1</code>", escape(plot.about))
    head = f'<h2 id="{escape(plot.anchor)}">{escape(plot.chart.title)}</h2>'
    return f"{head}\n<figure>\n{drawn}\n<figcaption><p>{about}</p></figcaption>\n</figure>"


def _pairs(pairs: Mapping[str, str]) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in pairs.items())
    return f"<table>\n{chr(10).join(rows)}\n</table>"


def _tensors(recording: Recording) -> str:
    rows = findings.by_tensor(recording) if recording.steps else []
    if len(rows) <= 2 * TENSORS:
        return _table(rows)
    return (
        f"<p>Those that change most.</p>\n{_table(rows[:TENSORS])}\n<p>Those that change least, of "
        f"{len(rows)}.</p>\n{_table(rows[-TENSORS:])}"
    )


def _table(rows: Sequence[tuple[str, int, float]]) -> str:
    lines = (
        f'<tr><td>{escape(name)}</td><td class="number">{size:,}</td><td class="number">{density:.4%}</td></tr>'
        for name, size, density in rows
    )
    head = "<tr><th>tensor</th><th>weights</th><th>changed in a step</th></tr>"
    return f"<table>\n{head}\n{chr(10).join(lines)}\n</table>"
