"""Small plots of a run as one SVG that needs nothing else: reward, sparsity, bytes per sync, staleness."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pulsesync.rl.view import Story

WIDTH, HEIGHT = 460, 260  # of one plot
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 36
COLOURS = ("#1d4ed8", "#6b7280")
TICKS = 4
SIZES = {"sent": "size_bytes", "full": "full_bytes"}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One plot: its curves by name, over steps."""

    title: str
    curves: Mapping[str, Points]
    logarithmic: bool = False


def panels(story: Story) -> list[Panel]:
    """The plots of a run; what it did not measure is empty."""
    lines = [line for _, line in sorted(story.lines.items())]
    syncs = sorted(story.syncs, key=lambda line: int(line["step"]))
    unchanged = [(s["step"], 100 * (1 - s["changed"] / s["total"])) for s in syncs if s["changed"] is not None]
    sizes = {name: [(s["step"], s[key]) for s in syncs] for name, key in SIZES.items()}
    return [
        Panel("Reward", {"reward": [(n["step"], n["reward"]) for n in lines if n["reward"] is not None]}),
        Panel("Weights unchanged in a version, %", {"unchanged": unchanged}),
        Panel("Bytes per sync", sizes, logarithmic=True),
        Panel("Staleness of completions, steps", {"behind": [(n["step"], n["behind"]) for n in lines]}),
    ]


def draw(shown: Sequence[Panel], title: str) -> str:
    """Return the SVG: two plots to a row."""
    width, height = 2 * WIDTH, -(-len(shown) // 2) * HEIGHT + 36
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#111827">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(LEFT, 24, title, 'font-size="15"'),
    ]
    for i, panel in enumerate(shown):
        out.append(f'<g transform="translate({i % 2 * WIDTH} {36 + i // 2 * HEIGHT})">')
        out += [*_panel(panel), "</g>"]
    return "\n".join([*out, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    out = [_text(LEFT, 24, panel.title, 'font-size="13"')]
    points = [point for curve in panel.curves.values() for point in curve]
    if not points:
        return [*out, _text(LEFT, HEIGHT / 2, "not measured in this run", 'fill="#6b7280"')]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = _ticks(min(xs), max(xs))
    y_ticks = _powers(min(ys), max(ys)) if panel.logarithmic else _ticks(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        low, at, high = (math.log10(v) if panel.logarithmic else v for v in (y_ticks[0], y, y_ticks[-1]))
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    for tick in y_ticks:
        _, y = place(x_ticks[0], tick)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        out.append(_text(LEFT - 6, y + 4, _short(tick), 'text-anchor="end"'))
    for tick in x_ticks:
        x, _ = place(tick, y_ticks[0])
        out.append(_text(x, HEIGHT - BOTTOM + 16, f"{tick:g}", 'text-anchor="middle"'))
    for (name, curve), colour in zip(panel.curves.items(), COLOURS, strict=False):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in curve))
        if path:
            out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            x, y = place(*curve[-1])
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>')
            if len(panel.curves) > 1:
                out.append(_text(x, y - 6, name, f'fill="{colour}" text-anchor="end"'))
    return out


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def _short(value: float) -> str:
    """A number in a few characters: 2.5, 10 k, 1 M."""
    for power, sign in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:g} {sign}"
    return f"{value:g}"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest value to above the highest, a few of them."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    return [round(n * step, 10) for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten around the values."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**n for n in range(first, max(last, first + 1) + 1)]
