"""A recording for the terminal: a summary, which tensors and layers change, by exponent, by expert."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report import findings
from pulsesync_lab.study.report.exponents import Band, by_exponent
from pulsesync_lab.study.report.findings import Spread

SHOWN = 8  # tensors at either end
CAST = 3  # tensors that were cast
FEW = 1e-3  # share of all changes below which an exponent is not shown


def show(recording: Recording, title: str, lr: float | None = None) -> RenderableType:
    """All tables of a recording; tables without data are left out. lr: if the recording does not have it."""
    tables = [
        _summary(recording, title),
        _windows(recording),
        _sizes(recording),
        _exponents(by_exponent(recording, lr)),
        _layers(recording),
        _tensors(recording),
        _experts(recording),
    ]
    shown: list[RenderableType] = []
    for table in tables:
        if table.row_count:
            shown += [table, ""]
    return Group(*shown)


def compare(recordings: Mapping[str, Recording]) -> RenderableType:
    """The same figures of several runs, side by side."""
    columns = {name: figures(recording) | _means(recording) for name, recording in recordings.items()}
    table = _table("", *columns)
    for key in dict.fromkeys(key for figures_ in columns.values() for key in figures_):
        _add(table, key, *(figures_.get(key, "–") for figures_ in columns.values()))
    return table


def _means(recording: Recording) -> dict[str, str]:
    """By window, by dtype and by codec: the mean of each."""
    out = {name: f"{spread.mean:.3%}" for name, spread in _in_sample(recording).items()}
    full = findings.full_bytes(recording)
    for codec, size in findings.sizes(recording).items():
        smaller = size.smaller(full)
        out[f"{codec}, × smaller"] = "–" if smaller is None else f"{smaller:,.1f}"
    return out


def figures(recording: Recording) -> dict[str, str]:
    """The summary as text: a name and a figure each."""
    steps, values = recording.steps, findings.sparsity(recording)
    out = {"steps": f"{len(steps)}", "tensors": f"{len(recording.header.tensors)}", "weights": f"{recording.size:,}"}
    every = findings.looks_apart(recording)
    between = "in a step" if every == 1 else _after(every)
    if spread := Spread.of(values):
        lowest = min(range(len(values)), key=values.__getitem__)
        out |= {
            f"unchanged {between}, {recording.header.dtype}": f"{spread.mean:.3%}",
            "  lowest, highest": f"{spread.least:.3%}, {spread.most:.3%}",
            "  standard deviation": f"{100 * spread.deviation:.3f} points",
            "  first step": f"{values[0]:.3%}",
            "  trough": f"{values[lowest]:.3%} at step {steps[lowest].step}",
        }
    if cast := findings.cast_from(recording):
        named = _some([f"{name} ({dtype})" for name, dtype in cast.items()])
        out[f"tensors compared after a cast to {recording.header.dtype}"] = named
    if (level := findings.plateau(recording)) is not None:
        out["  second half"] = f"{level:.3%}"
    if (end := findings.warm_up(recording)) is not None:
        out["learning rate is at its highest from"] = f"step {end}"
    return out | _more(recording)


def _some(names: Sequence[str]) -> str:
    return f"{len(names)}: " + ", ".join(names[:CAST]) + (", …" if len(names) > CAST else "")


def _more(recording: Recording) -> dict[str, str]:
    steps, out = recording.steps, {}
    if units := findings.shares(step.units for step in steps):
        rest = sum(share for unit, share in units.items() if unit > 2)
        out["changes by 1, 2, more units"] = f"{units.get(1, 0):.1%}, {units.get(2, 0):.1%}, {rest:.1%}"
        up = findings.share(steps, "up", "all_changed")
        out["changes that go up"] = "–" if up is None else f"{up:.1%}"
    if again := findings.overlap(recording):
        by_chance = statistics.fmean(share for _, share in findings.chance(recording))
        out["changed a step before too"] = (
            f"{statistics.fmean(share for _, share in again):.1%}, {by_chance:.2%} by chance"
        )
        same = findings.share(steps[1:], "same_way", "again")
        out["  of these, the same way"] = "–" if same is None else f"{same:.1%}"
    if gradients := findings.gradient_density(recording):
        out["gradients that are not zero"] = f"{statistics.fmean(share for _, share in gradients):.2%}"
    if hot := [step.hot for step in steps if step.hot is not None]:
        out["hot weights"] = f"{statistics.fmean(hot):.2%}"
    if seconds := [step.seconds for step in steps if step.seconds is not None]:
        out["seconds to look at a step"] = f"{statistics.fmean(seconds):.3f}"
    return out


def facts(recording: Recording) -> dict[str, Any]:
    """The same as numbers, for --json."""
    values = findings.sparsity(recording)
    spread, every = Spread.of(values), findings.looks_apart(recording)
    return {
        "steps": len(recording.steps),
        "tensors": len(recording.header.tensors),
        "weights": recording.size,
        "dtype": recording.header.dtype,
        "sparsity": None if spread is None else vars(spread),
        "first": values[0] if values else None,
        "plateau": findings.plateau(recording),
        "warm_up": findings.warm_up(recording),
        "by_step": [[step.step, value] for step, value in zip(recording.steps, values, strict=True)],
        "by_k": {str(k * every): _mean(findings.window_sparsity(recording, k)) for k in recording.header.windows},
        "by_dtype": {dtype: _mean(findings.dtype_sparsity(recording, dtype)) for dtype in recording.header.contrast},
        "units": {str(unit): share for unit, share in findings.shares(s.units for s in recording.steps).items()},
        "overlap": _mean(findings.overlap(recording)),
        "same_way": findings.share(recording.steps[1:], "same_way", "again"),
        "gradients": _mean(findings.gradient_density(recording)),
        "full_bytes": findings.full_bytes(recording),
        "bytes": {codec: vars(size) for codec, size in findings.sizes(recording).items()},
        "facts": dict(recording.header.facts),
    }


def _mean(points: Sequence[tuple[int, float]]) -> float | None:
    return statistics.fmean(value for _, value in points) if points else None


def _table(*headings: str, title: str = "") -> Table:
    caption = Text(title, "table.title") if title else None
    table = Table(box=None, pad_edge=False, title=caption, title_justify="left", header_style="dim")
    for n, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if n else "left", no_wrap=True)
    return table


def _add(table: Table, *cells: str) -> None:
    """A row of plain text: a name may look like markup."""
    table.add_row(*map(Text, cells))


def _summary(recording: Recording, title: str) -> Table:
    table = _table("", "", title=title)
    table.show_header = False
    for key, value in figures(recording).items():
        _add(table, key, value)
    return table


def _windows(recording: Recording) -> Table:
    table = _table("unchanged", "mean", "lowest", "highest", title="In the sample")
    for name, spread in _in_sample(recording).items():
        _add(table, name, f"{spread.mean:.3%}", f"{spread.least:.3%}", f"{spread.most:.3%}")
    return table


def _in_sample(recording: Recording) -> dict[str, Spread]:
    """Unchanged shares, by number of steps between, and by dtype."""
    windows, dtypes, every = recording.header.windows, recording.header.contrast, findings.looks_apart(recording)
    rows = {_after(k * every): findings.window_sparsity(recording, k) for k in windows}
    rows |= {f"in {dtype}": findings.dtype_sparsity(recording, dtype) for dtype in dtypes}
    spreads = {name: Spread.of([value for _, value in points]) for name, points in rows.items()}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _after(steps: int) -> str:
    return f"after {steps} step{'s' if steps > 1 else ''}"


def _sizes(recording: Recording) -> Table:
    table = _table(
        "codec",
        "bytes predicted",
        "real",
        "prediction off by",
        "× smaller",
        "steps",
        title="A patch, mean of the same steps for all codecs; predicted with its manifest, real without",
    )
    for codec, size in findings.sizes(recording).items():
        error, smaller = findings.prediction_error(recording, codec), size.smaller(findings.full_bytes(recording))
        _add(
            table,
            codec,
            *("–" if value is None else f"{value:,.0f}" for value in (size.predicted, size.real)),
            "–" if error is None else f"{error:+.1%}",
            "–" if smaller is None else f"{smaller:,.1f}",
            f"{size.steps}",
        )
    return table


def _exponents(found: Sequence[Band]) -> Table:
    table = _table(
        "weights from",
        "share of weights",
        "of changes",
        "changed",
        "if noise",
        "if steady",
        title="By magnitude, and by theory if gradients are noise or steady",
    )
    weights, changed = sum(f.weights for f in found), sum(f.changed for f in found)
    for one in found:
        if changed and one.changed / changed >= FEW:
            theory = ("–" if share is None else f"{share:.3%}" for share in (one.noise, one.steady))
            row = (f"{one.weights / max(weights, 1):.2%}", f"{one.changed / changed:.1%}", f"{one.density:.3%}")
            _add(table, f"{one.magnitude:.2g}", *row, *theory)
    return table


def _layers(recording: Recording) -> Table:
    table = _table("layer", "changed, mean", "lowest", "highest", title="By layer")
    for name, densities in findings.by_layer(recording).items():
        if spread := Spread.of(densities):
            _add(table, name, *(f"{value:.3%}" for value in (spread.mean, spread.least, spread.most)))
    return table


def _tensors(recording: Recording) -> Table:
    table = _table("tensor", "weights", "changed, mean", title="Tensors that change most, and least")
    rows = findings.by_tensor(recording) if recording.steps else []
    short = len(rows) <= 2 * SHOWN
    for name, size, density in rows if short else [*rows[:SHOWN], *rows[-SHOWN:]]:
        if not short and name == rows[-SHOWN][0]:
            _add(table, "…", "", "")
        _add(table, name, f"{size:,}", f"{density:.4%}")
    return table


def _experts(recording: Recording) -> Table:
    table = _table("layer", "expert", "changed, mean", "steps without a change", title="Experts")
    for (layer, expert), densities in findings.by_expert(recording).items():
        if densities:
            still = sum(not density for density in densities)
            _add(table, layer, f"{expert}", f"{statistics.fmean(densities):.4%}", f"{still} of {len(densities)}")
    return table
