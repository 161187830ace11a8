"""The charts of a report, each with a text on what it shows and how to read it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pulsesync_lab.charts import Bars, Chart, ChartPoint, HeatMap, Panel
from pulsesync_lab.study.predict.theory import adam_bound, critical_magnitude
from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report import findings
from pulsesync_lab.study.report.exponents import Band, betas, by_exponent, is_adam, learning_rate, masters

FEW = 1e-3  # share of all changes
STILL = -250  # updates in this class or a lower one count as none
COLUMNS = 60  # of a heat map over time: more steps are averaged


@dataclass(frozen=True)
class Plot:
    """A chart, and a short text."""

    anchor: str  # its name in the page
    chart: Chart
    about: str


def plots(recording: Recording, lr: float | None = None) -> list[Plot]:
    """All plots for which this recording has data, in the order of the report."""
    found = (
        _over_time(recording),
        _by_k(recording),
        _by_dtype(recording),
        _layers(recording),
        _kinds(recording),
        _experts(recording),
        _exponents(recording, lr),
        _units(recording),
        _moved(recording),
        _overlap(recording),
        _bytes(recording),
        _bytes_over_time(recording),
        _gradients(recording),
        _facts(recording),
    )
    return [plot for plot in found if plot is not None]


def _over_time(recording: Recording) -> Plot | None:
    values = findings.sparsity(recording)
    if not values:
        return None
    points = [(step.step, 100 * value) for step, value in zip(recording.steps, values, strict=True)]
    x, y = min(points, key=lambda point: point[1])
    end = findings.warm_up(recording)
    panel = Panel(
        "Weights unchanged by a step, %",
        {"unchanged": points},
        x_label="step",
        marks=[ChartPoint(x, y, f"lowest: {y:.2f} % at step {x}")] if len(points) > 1 else [],
        verticals={} if end is None else {"warm-up ends": end},
        dots=len(points) <= 40,
    )
    return Plot(
        "time",
        panel,
        f"The share of {recording.header.dtype} weights whose bits are the same before and after a step. Higher is "
        "cheaper to send. Runs with a warm-up dip where the learning rate reaches its top and settle higher later: "
        "size buffers and links for the lowest point, not for the mean.",
    )


def _by_k(recording: Recording) -> Plot | None:
    rows = {k: [value for _, value in findings.window_sparsity(recording, k)] for k in recording.header.windows}
    rows = {k * findings.looks_apart(recording): values for k, values in rows.items() if values}
    if len(rows) < 2:
        return None
    curves = {
        "mean": [(k, 100 * statistics.fmean(values)) for k, values in rows.items()],
        "lowest": [(k, 100 * min(values)) for k, values in rows.items()],
    }
    panel = Panel(
        "Weights unchanged after k steps, %", curves, log_x=True, x_label="k, steps", x_ticks=list(rows), dots=True
    )
    return Plot(
        "k",
        panel,
        "The share of the sample that is what it was k steps before. It falls slower than k grows, because the same "
        "weights change again: a worker that is k steps behind fetches less than k patches' worth of weights.",
    )


def _by_dtype(recording: Recording) -> Plot | None:
    rows = {d: [value for _, value in findings.dtype_sparsity(recording, d)] for d in recording.header.contrast}
    own = [value for _, value in findings.window_sparsity(recording, 1)] or findings.sparsity(recording)
    rows = {recording.header.dtype: own} | {dtype: values for dtype, values in rows.items() if values}
    if len(rows) < 2:
        return None
    order = sorted(rows, key=lambda dtype: statistics.fmean(rows[dtype]))
    means = [100 * statistics.fmean(rows[dtype]) for dtype in order]
    return Plot(
        "dtype",
        Bars("Weights unchanged by a step in each dtype, %", order, {"unchanged": means}, numbers=True),
        "The same steps, seen in other dtypes. FP32 keeps every small step, so nearly nothing is unchanged; the "
        "coarser the dtype, the more steps are too small to be seen.",
    )


def _layers(recording: Recording) -> Plot | None:
    rows = findings.by_layer(recording)
    if len(rows) < 2 or not recording.steps:
        return None
    groups = _groups(len(recording.steps))
    values = [[100 * statistics.fmean(row[begin:end]) for begin, end in groups] for row in rows.values()]
    names = [f"layer {name}" if name.isdigit() else name for name in rows]
    columns = [str(recording.steps[begin].step) for begin, _ in groups]
    about = "How much of each layer changes, over time: dark changes most. Tensors outside of layers have a row each."
    if len(groups) < len(recording.steps):
        about += f" Each column is the mean of up to {groups[0][1] - groups[0][0]} steps."
    chart = HeatMap("Weights changed, by layer over time", names, columns, values, "% changed", "step")
    return Plot("layers", chart, about)


def _groups(steps: int) -> list[tuple[int, int]]:
    wide = max(1, math.ceil(steps / COLUMNS))
    return [(begin, min(begin + wide, steps)) for begin in range(0, steps, wide)]


def _kinds(recording: Recording) -> Plot | None:
    found = findings.by_kind(recording)
    kinds, layers = sorted({kind for kind, _ in found}), sorted({layer for _, layer in found}, key=int)
    if len(kinds) < 2 or len(layers) < 2:
        return None
    values = [[_percent(found.get((kind, layer))) for layer in layers] for kind in kinds]
    return Plot(
        "kinds",
        HeatMap("Weights changed, by kind and layer", kinds, layers, values, "% changed", "layer"),
        "The mean over all steps, for each kind of tensor in each layer. Kinds with small weights change more at the "
        "same learning rate; a grey cell is a tensor that the layer does not have.",
    )


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _experts(recording: Recording) -> Plot | None:
    found = {key: statistics.fmean(row) for key, row in findings.by_expert(recording).items() if row}
    if not found:
        return None
    layers, experts = list(dict.fromkeys(layer for layer, _ in found)), sorted({expert for _, expert in found})
    values = [[_percent(found.get((layer, expert))) for expert in experts] for layer in layers]
    names, columns = [f"layer {layer}" for layer in layers], [str(expert) for expert in experts]
    return Plot(
        "experts",
        HeatMap("Weights changed, by layer and expert", names, columns, values, "% changed", "expert"),
        "The mean over all steps of each expert. Experts that the router does not choose get no gradient, but momentum "
        "moves them on for a while.",
    )


def _exponents(recording: Recording, lr: float | None) -> Plot | None:
    all_bands = by_exponent(recording, lr)
    bands = _worth_showing([band for band in all_bands if band.number])  # zero has no place on a logarithmic axis
    measured = [(band.magnitude, 100 * band.density) for band in bands if band.changed]
    if not measured:
        return None
    curves = {"recorded": measured}
    lowest = min(y for _, y in measured)
    for name, what in (("theory, gradients are noise", "noise"), ("theory, they keep their sign", "steady")):
        points = [(band.magnitude, 100 * share) for band in bands if (share := getattr(band, what)) is not None]
        if points := [(x, y) for x, y in points if y >= lowest]:
            curves[name] = points
    shown = [x for curve in curves.values() for x, _ in curve]
    rate = learning_rate(recording, lr) if is_adam(recording) else None
    dtype = recording.header.dtype
    factor, at = f"{critical_magnitude(1.0, dtype=dtype)[0]:,.0f} ×", critical_magnitude(rate or 0.0, dtype=dtype)[0]
    critical = {f"{factor} learning rate": at} if rate and min(shown) <= at <= max(shown) else {}
    panel = Panel(
        "Weights changed by a step, by magnitude, %",
        curves,
        logarithmic=True,
        log_x=True,
        x_label="size of the weight",
        verticals=critical,
        dots=True,
    )
    about = "The share of weights of each size that change in a step: small weights change most."
    if is_adam(recording):
        about += (
            f" Above {factor} the learning rate a step is less than half the distance to the next value, and a change "
            "is a matter of many steps."
        )
    if len(curves) > 1:
        about += (
            " Adam's steps lie between the theory's two curves: shorter in noise, about a learning rate long where "
            f"gradients keep their sign. Both are for {'' if masters(recording) else 'no '}FP32 master weights, long "
            "after the start: in the first steps, weights that begin on a value have not come half-way to the next."
        )
    return Plot("exponents", panel, about + _zeros(all_bands))


def _zeros(bands: Sequence[Band]) -> str:
    """A note on what is not in the plot, if it matters."""
    zero = next((band for band in bands if not band.number), None)
    changed, weights = sum(band.changed for band in bands), sum(band.weights for band in bands)
    if zero is None or zero.changed < changed / 100:
        return ""
    return (
        f" Not shown: weights that are zero or subnormal, {100 * zero.weights / weights:.2f} % of all, which have "
        f"{100 * zero.changed / changed:.0f} % of the changes."
    )


def _worth_showing(bands: Sequence[Band]) -> list[Band]:
    """Without zero and the tiny weights, which have almost none of the changes."""
    before, total = 0, sum(band.changed for band in bands)
    shown = []
    for band in bands:
        before += band.changed
        if band.weights and before >= FEW * total:
            shown.append(band)
    return shown


def _units(recording: Recording) -> Plot | None:
    found = findings.shares(step.units for step in recording.steps)
    if not found:
        return None
    names = [str(unit) for unit in found]
    chart = Bars(
        "How far weights move, % of changes",
        names,
        {"changes": [100 * share for share in found.values()]},
        x_label="units of the last place; from 16 on the power of two below",
        numbers=len(found) <= 20,
    )
    return Plot(
        "units",
        chart,
        "A change by one unit is a step to the next value that the dtype has. Nearly all are, which is why a few bits "
        "are enough for one; long steps are of weights near zero.",
    )


def _moved(recording: Recording) -> Plot | None:
    found = findings.moved(recording)
    if not found:
        return None
    points = [(2.0 ** ((key + 0.5) / 2), 100 * share) for key, share in found.items() if key > STILL]
    still = sum(share for key, share in found.items() if key <= STILL)
    verticals = {"the learning rate": 1.0}
    decays = betas(recording) if is_adam(recording) else None
    if decays is not None and math.isfinite(bound := adam_bound(decays)):
        verticals[f"Adam's bound, {bound:.2f} ×"] = bound
    panel = Panel(
        "Updates by size, % of the sample",
        {"updates": points},
        log_x=True,
        x_label="|update| / learning rate",
        verticals=verticals,
        dots=True,
    )
    about = (
        "How large the optimizer's updates are before rounding, in learning rates, in classes of half a power of two."
    )
    if is_adam(recording):
        about += " Adam's are about one learning rate at first and smaller later; its betas bound them."
    if still:
        about += f" Not drawn: {still:.2%} of the weights in the sample, which did not move at all."
    return Plot("moved", panel, about)


def _overlap(recording: Recording) -> Plot | None:
    again = [(step, 100 * share) for step, share in findings.overlap(recording)]
    if not any(share for _, share in again):
        return None
    by_chance = [(step, 100 * share) for step, share in findings.chance(recording)]
    same = [(step.step, 100 * step.same_way / step.again) for step in recording.steps[1:] if step.again]
    curves = {"changed a step before too": again, "of these, the same way": same, "by chance": by_chance}
    return Plot(
        "overlap",
        Panel("Changes on weights that had just changed, %", curves, x_label="step"),
        "How many of a step's changes fall on weights that changed in the step before, and how many of these go on in "
        "the same direction; and what chance would yield. The codec `history` exploits the difference.",
    )


def _bytes(recording: Recording) -> Plot | None:
    found = {codec: size for codec, size in findings.sizes(recording).items() if size.comparable}
    if not found:
        return None
    series: dict[str, Sequence[float | None]] = {}
    if any(size.predicted for size in found.values()):
        series["predicted"] = [size.predicted for size in found.values()]
    if any(size.real for size in found.values()):
        series["real"] = [size.real for size in found.values()]
    full = findings.full_bytes(recording)
    return Plot(
        "bytes",
        Bars("Bytes of a patch by codec, mean", list(found), series, logarithmic=True, numbers=True),
        f"What has to travel for a step: all weights are {full:,} bytes. `plain` writes index and value, `gap` "
        "distances and values, `context` codes against the old weights, `history` against what changed before as well. "
        "Predicted from the counts, with a manifest of some hundred bytes; real where a patch was made, without. All "
        "codecs are compared over the same steps.",
    )


def _bytes_over_time(recording: Recording) -> Plot | None:
    """By codec: real where every step has it, else predicted."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for codec in findings.sizes(recording):
        sizes = [(step.step, step.sizes[codec]) for step in recording.steps if codec in step.sizes]
        if all(size.real is not None for _, size in sizes):
            curves[f"{codec}, real"] = [(step, size.real or 0) for step, size in sizes]
        else:
            curves[f"{codec}, predicted"] = [
                (step, size.predicted) for step, size in sizes if size.predicted is not None
            ]
    if len(recording.steps) < 2 or not curves:
        return None
    panel = Panel("Bytes of a patch over time", curves, logarithmic=True, x_label="step")
    return Plot("bytes-time", panel, "The same, step by step: the highest point is what a link must carry.")


def _gradients(recording: Recording) -> Plot | None:
    density = [(step, 100 * share) for step, share in findings.gradient_density(recording)]
    if not density:
        return None
    changed = [(step.step, 100 * d) for step, d in zip(recording.steps, recording.density(), strict=True)]
    panel = Panel(
        "Gradients that are not zero, and weights that change, %",
        {"gradients": density, "weights": changed},
        logarithmic=True,
        x_label="step",
    )
    return Plot(
        "gradients",
        panel,
        "Gradients are dense: nearly every weight is pushed at every step. That few weights change is the work of "
        "rounding, not of sparse gradients.",
    )


def _facts(recording: Recording) -> Plot | None:
    """Reward or loss, if the run recorded one of them."""
    for name in ("reward", "loss"):
        points = [
            (step.step, float(step.facts[name]))
            for step in recording.steps
            if isinstance(step.facts.get(name), int | float)
        ]
        if len(points) > 1:
            about = f"The {name} of each step, as recorded by the run, for comparison with the other plots."
            return Plot(name, Panel(name.capitalize(), {name: points}, x_label="step"), about)
    return None
