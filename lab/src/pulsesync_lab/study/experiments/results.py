"""The pages: results over the seeds of every arm, with the published figures in the same columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor, log10
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pulsesync.errors import FormatError
from pulsesync_lab.study.experiments.arm import CONFIG, Arm, Experiment, Row
from pulsesync_lab.study.experiments.measures import measure
from pulsesync_lab.study.recording import Recording

TWO_DIGITS = "two significant digits"  # a form, for figures from 0.01 to 1000 in one column


@dataclass(frozen=True)
class ResultTable:
    """Columns of the results that belong together: their keys, headings and formats."""

    title: str
    columns: Mapping[str, str]
    form: str = ".2f"
    own: Mapping[str, str] = field(default_factory=dict)  # formats of columns that differ


TABLES = {
    "windows": ResultTable(
        "Weights unchanged after k steps, % (min: the worst step)",
        {"k1": "k = 1", "min": "min", "k2": "2", "k4": "4", "k8": "8", "k16": "16", "k32": "32"}, ".3f",
    ),
    "profile": ResultTable(
        "Over the run: weights unchanged in a step, % (trough: the lowest ten in a row; plateau: the second half)",
        {"first": "first step", "trough": "trough", "trough step": "at step", "plateau": "plateau"}, ".3f",
        {"trough step": ".0f"},
    ),
    "dtypes": ResultTable(
        "Unchanged in a step by dtype, %",
        {"F32": "FP32", "F16": "FP16", "BF16": "BF16", "F8_E4M3": "FP8 e4m3"}, ".3f",
    ),
    "changes": ResultTable(
        "What changes (overlap: of the changes, those of a step before; later: the second half; bits: shortest codec)",
        {
            "one unit": "by one unit, %", "overlap early": "overlap, steps 2–3, %", "overlap late": "overlap, later, %",
            "same way": "same way again, %", "gradients": "gradients ≠ 0, %", "inactive": "tensors unchanged, %",
            "moved": "mean update, 1e-6", "bits": "bits a change", "median": "median weight",
            "reward first": "reward, begin", "reward last": "reward, end",
        },
        ".1f", {"moved": TWO_DIGITS, **dict.fromkeys(("bits", "median", "reward first", "reward last"), ".3f")},
    ),
    "experts": ResultTable(
        "Experts",
        {
            "experts": "experts", "experts changed": "changed in a step, %", "experts never": "never in ten steps, %",
            "least expert": "least changed, % a step", "most expert": "most changed, % a step",
        },
        ".2f", {"experts": ".0f"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ResultRow:
    """One row of a table: ours, from several seeds, or published."""

    name: str
    figures: Mapping[str, Sequence[float] | str]  # text is shown as it is
    published: bool = False

    def cell(self, column: str, form: str) -> str:
        values = self.figures.get(column, ())
        if not values:
            return ""
        text = values if isinstance(values, str) else _mean(values, form)
        return f"*{text}*" if self.published else text


def _mean(values: Sequence[float], form: str) -> str:
    mean = fmean(values)
    if form == TWO_DIGITS:
        form = f".{max(0, 1 - floor(log10(abs(mean))))}f" if mean else ".1f"
    return f"{mean:{form}} ± {stdev(values):{form}}" if len(values) > 1 else f"{mean:{form}}"


def path_of(folder: Path, arm: Arm, seed: int) -> Path:
    """The file of the recording of an arm with a seed."""
    return folder / f"{arm.file_name}-seed{seed}.jsonl"


def read(path: Path, arm: Arm, seed: int) -> Recording | None:
    """The recording of this arm with this seed, made on any device; None if there is none."""
    recording = read_any(path)
    if recording is None:
        return None
    facts = recording.header.facts
    made = dict(facts.get("arm", {}), device="")
    return recording if made == replace(arm, device="").to_json() and facts.get("seed") == seed else None


def read_any(path: Path) -> Recording | None:
    """The recording in a file, of this configuration or another."""
    try:
        return Recording.read(path)
    except (FileNotFoundError, FormatError):
        return None


def write_results(experiment: Experiment, folder: Path) -> None:
    """Write results.md of an experiment, from the recordings in its folder."""
    lines, made = _lines(experiment, folder), _made(experiment, folder)
    steps = sorted({arm.steps for arm in experiment.arms})
    devices = sorted({str(facts["arm"]["device"]) for facts in made}) or ["nothing yet"]
    seeds = len({facts["seed"] for facts in made})
    page = [
        f"# {experiment.name}: {experiment.question}", "",
        f"{len(experiment.arms)} arms × {seeds} seeds, {' or '.join(map(str, steps))} optimizer steps, "
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


def _lines(experiment: Experiment, folder: Path) -> list[ResultRow]:
    """Arms, each with its published figures below it, then the other published figures."""
    lines: list[ResultRow] = []
    for arm in experiment.arms:
        for prefix, text in (("", ""), ("critic-", ", critic")):
            found = _measured(arm, experiment.seeds, folder, prefix)
            if found or not prefix:
                lines.append(ResultRow(arm.name + text, found))
        lines += [_published(row) for row in experiment.published if row.beside == arm.name]
    known = {arm.name for arm in experiment.arms}
    return lines + [_published(row) for row in experiment.published if row.beside not in known]


def _made(experiment: Experiment, folder: Path) -> list[Mapping[str, Any]]:
    """The facts in the existing recordings."""
    each = [(arm, seed) for arm in experiment.arms for seed in experiment.seeds]
    found = [read(path_of(folder, arm, seed), arm, seed) for arm, seed in each]
    return [recording.header.facts for recording in found if recording is not None]


def _measured(arm: Arm, seeds: Sequence[int], folder: Path, prefix: str) -> dict[str, list[float]]:
    """Column by column, a number for each existing recording of the arm."""
    columns: dict[str, list[float]] = {}
    for seed in seeds:
        path = path_of(folder, arm, seed)
        recording = read(path.with_name(prefix + path.name), arm, seed)
        for name, value in (measure(recording) if recording is not None else {}).items():
            columns.setdefault(name, []).append(value)
    return columns


def _published(row: Row) -> ResultRow:
    figures = {name: value if isinstance(value, str) else (value,) for name, value in row.figures.items()}
    return ResultRow(f"{row.source}: {row.name}", figures, published=True)


def _table(table: ResultTable, lines: Sequence[ResultRow]) -> list[str]:
    """Only rows and columns that have figures."""
    columns = [column for column in table.columns if any(line.figures.get(column) for line in lines)]
    out = [f"## {table.title}", "", f"| | {' | '.join(table.columns[column] for column in columns)} |"]
    out.append("|---" * (len(columns) + 1) + "|")
    for line in lines:
        cells = [line.cell(column, table.own.get(column, table.form)) for column in columns]
        if any(cells) or not line.published:
            out.append(f"| {_name(line)} | {' | '.join(cells)} |")
    return [*out, ""]


def _name(line: ResultRow) -> str:
    return f"*{line.name}*" if line.published else line.name
