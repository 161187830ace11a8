"""The pages: what the seeds of every arm came to, with the published figures in the same columns."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from pulsesync.study.experiments.arm import CONFIG, Arm, Experiment, Row
from pulsesync.study.experiments.measures import measure
from pulsesync.study.recording import Recording


@dataclass(frozen=True)
class Table:
    """Columns of the results that belong together: their keys, and how they are headed and written."""

    title: str
    columns: Mapping[str, str]
    form: str = ".2f"
    own: Mapping[str, str] = field(default_factory=dict)  # of columns that are written otherwise


TABLES = {
    "windows": Table(
        "Weights unchanged after k steps, % (min: the worst step)",
        {"k1": "k = 1", "min": "min", "k2": "2", "k4": "4", "k8": "8", "k16": "16", "k32": "32"}, ".3f",
    ),
    "profile": Table(
        "Over the run: weights unchanged in a step, % (trough: the lowest ten in a row; plateau: the second half)",
        {"first": "first step", "trough": "trough", "trough step": "at step", "plateau": "plateau"}, ".3f",
        {"trough step": ".0f"},
    ),
    "dtypes": Table(
        "Unchanged in a step by dtype, %",
        {"F32": "FP32", "F16": "FP16", "BF16": "BF16", "F8_E4M3": "FP8 e4m3"}, ".3f",
    ),
    "changes": Table(
        "What changes (overlap: of the changes, those of a step before; later: the second half; bits: shortest codec)",
        {
            "one unit": "by one unit, %", "overlap early": "overlap, steps 2–3, %", "overlap late": "overlap, later, %",
            "same way": "same way again, %", "gradients": "gradients ≠ 0, %", "inactive": "tensors unchanged, %",
            "moved": "mean update ÷ rate", "bits": "bits a change", "median": "median weight",
            "reward first": "reward, begin", "reward last": "reward, end",
        },
        ".1f", dict.fromkeys(("moved", "bits", "median", "reward first", "reward last"), ".3f"),
    ),
    "experts": Table(
        "Experts",
        {
            "experts": "experts", "experts changed": "changed in a step, %", "experts never": "never in ten steps, %",
            "least expert": "least changed, % a step", "most expert": "most changed, % a step",
        },
        ".2f", {"experts": ".0f"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One row of a table: ours, from several seeds, or published."""

    name: str
    figures: Mapping[str, Sequence[float]]
    published: bool = False

    def cell(self, column: str, form: str) -> str:
        values = self.figures.get(column, ())
        if not values:
            return ""
        told = f"{fmean(values):{form}}"
        if len(values) > 1:
            told += f" ± {stdev(values):{form}}"
        return f"*{told}*" if self.published else told


def path_of(folder: Path, arm: Arm, seed: int) -> Path:
    """Where the recording of an arm with a seed is kept."""
    return folder / f"{arm.file_name}-seed{seed}.jsonl"


def write_results(experiment: Experiment, folder: Path) -> None:
    """Write results.md of an experiment, from the recordings in its folder."""
    lines = _lines(experiment, folder)
    steps = sorted({arm.steps for arm in experiment.arms})
    devices = _devices(experiment, folder)
    page = [
        f"# {experiment.name}: {experiment.question}", "",
        f"{len(experiment.arms)} arms × {len(experiment.seeds)} seeds, {' or '.join(map(str, steps))} optimizer steps, "
        f"on {' and '.join(devices)}. Mean ± standard deviation over seeds; *published figures in italics*. What was "
        "run is in config.json; every recording here can be shown with `pulse study`.", "",
    ]  # fmt: skip
    for name in experiment.tables:
        page += _table(TABLES[name], lines)
    if experiment.differs:
        page += ["## Why ours differ", "", experiment.differs, ""]
    sources = sorted({row.source for row in experiment.published})
    if sources:
        page += [f"Published: {'; '.join(sources)}.", ""]
    (folder / "results.md").write_text("\n".join(page))


def write_index(out: Path) -> None:
    """Write DIR/results.md over all experiments that have a folder in it."""
    page = ["# Experiments", ""]
    for config in sorted(out.glob(f"*/{CONFIG}")):
        experiment = Experiment.load(config.parent)
        page += [f"## [{experiment.name}]({experiment.name}/results.md): {experiment.question}", ""]
        page += ["| arm | unchanged, k = 1, % | 8 | 32 | reward, end |", "|---|---|---|---|---|"]
        for line in _lines(experiment, out / experiment.name):
            cells = [line.cell(column, ".3f") for column in ("k1", "k8", "k32", "reward last")]
            page.append(f"| {_name(line)} | {' | '.join(cells)} |")
        page.append("")
    (out / "results.md").write_text("\n".join(page))


def _lines(experiment: Experiment, folder: Path) -> list[Line]:
    """Arms, each with what stands under it, then what is published beside."""
    lines: list[Line] = []
    for arm in experiment.arms:
        for prefix, told in (("", ""), ("critic-", ", critic")):
            paths = [path_of(folder, arm, seed) for seed in experiment.seeds]
            found = _measured([path.with_name(prefix + path.name) for path in paths])
            if found or not prefix:
                lines.append(Line(arm.name + told, found))
        lines += [_published(row) for row in experiment.published if row.beside == arm.name]
    known = {arm.name for arm in experiment.arms}
    return lines + [_published(row) for row in experiment.published if row.beside not in known]


def _devices(experiment: Experiment, folder: Path) -> list[str]:
    """Where the recordings that are there were made."""
    paths = [path_of(folder, arm, seed) for arm in experiment.arms for seed in experiment.seeds]
    told = [json.loads(path.read_text().partition("\n")[0])["facts"] for path in paths if path.exists()]
    return sorted({str(facts.get("arm", {}).get("device", "?")) for facts in told})


def _measured(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Column by column, a number for each recording that is there."""
    columns: dict[str, list[float]] = {}
    for path in paths:
        if path.exists():
            for name, value in measure(Recording.read(path)).items():
                columns.setdefault(name, []).append(value)
    return columns


def _published(row: Row) -> Line:
    return Line(f"{row.source}: {row.name}", {name: (value,) for name, value in row.figures.items()}, published=True)


def _table(table: Table, lines: Sequence[Line]) -> list[str]:
    """Rows that have something to say in it; columns that somebody fills."""
    columns = [column for column in table.columns if any(line.figures.get(column) for line in lines)]
    out = [f"## {table.title}", "", f"| | {' | '.join(table.columns[column] for column in columns)} |"]
    out.append("|---" * (len(columns) + 1) + "|")
    for line in lines:
        cells = [line.cell(column, table.own.get(column, table.form)) for column in columns]
        if any(cells) or not line.published:
            out.append(f"| {_name(line)} | {' | '.join(cells)} |")
    return [*out, ""]


def _name(line: Line) -> str:
    return f"*{line.name}*" if line.published else line.name
