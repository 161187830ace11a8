"""Small, self-contained SVG charts: lines, bars and heat maps, one or several in a picture.

    Path("run.svg").write_text(draw([Panel("Reward", {"reward": [(1, 0.2), (2, 0.3)]})], "a run"))

A chart is a record; the caller decides what it shows. Every text in it is escaped, curves differ in dash as well as in
colour, and screen readers get title and description.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeGuard

WIDTH, HEIGHT = 460, 260  # of one chart
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 36
LEGEND = 16  # pixels of a row of names
COLOURS = ("#1d4ed8", "#c2410c", "#047857", "#9d174d", "#6b7280", "#7c3aed", "#0e7490", "#a16207")
DASHES = ("", "6 3", "2 2", "8 3 2 3", "4 2", "1 3", "10 4", "5 2 1 2")
GREY, LINE = "#6b7280", "#e5e7eb"
RAMP = ((239, 246, 255), (96, 165, 250), (30, 64, 175), (23, 17, 60))  # light to dark, for heat maps
HALO = 'stroke="white" stroke-width="3" paint-order="stroke"'  # around text that may lie on a curve
NONE = "#f3f4f6"  # of a cell without a value
TICKS = 4

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ChartPoint:
    """A highlighted point, and its label."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Panel:
    """Curves by name. Values that are not finite are left out; on a logarithmic axis also those not above zero."""

    title: str
    curves: Mapping[str, Points]
    logarithmic: bool = False
    log_x: bool = False
    x_label: str = ""
    x_ticks: Sequence[float] = ()  # if the usual round numbers would not fit
    marks: Sequence[ChartPoint] = ()
    verticals: Mapping[str, float] = field(default_factory=dict)  # lines from top to bottom
    dots: bool = False  # a dot at every point


@dataclass(frozen=True)
class Bars:
    """Bars side by side for each category, one per series; None for a missing value."""

    title: str
    categories: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    logarithmic: bool = False
    x_label: str = ""
    numbers: bool = False  # written above the bars


@dataclass(frozen=True)
class HeatMap:
    """A value for each row and column, dark for high; None for a missing value."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    unit: str = ""
    x_label: str = ""


Chart = Panel | Bars | HeatMap


@dataclass(frozen=True)
class _Box:
    """Where in a picture a chart is drawn: pixels."""

    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    top: float = TOP

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool

    @classmethod
    def around(cls, values: Sequence[float], logarithmic: bool) -> "_Axis":
        """From a round number below all values to one above."""
        chosen = (powers if logarithmic else ticks)(min(values), max(values))
        return cls(chosen[0], chosen[-1], chosen, logarithmic)

    @classmethod
    def along(cls, values: Sequence[float]) -> "_Axis":
        """From the lowest value to the highest, with round numbers between."""
        low, high = min(values), max(values)
        chosen = ticks(low, high)
        if _alike(low, high):
            return cls(chosen[0], chosen[-1], chosen, False)
        return cls(low, high, [tick for tick in chosen if low <= tick <= high], False)

    def share(self, value: float) -> float:
        """The position of a value on the axis: 0 to 1, or beyond for a value outside."""
        low, at, high = (math.log10(v) if self.logarithmic else v for v in (self.low, value, self.high))
        return (at - low) / (high - low)


def draw(shown: Sequence[Chart], title: str) -> str:
    """Return the SVG: two charts per row."""
    width, height = 2 * WIDTH, -(-len(shown) // 2) * HEIGHT + 36
    out = [*_open(width, height, title, ""), text(LEFT, 24, title, 'font-size="15"')]
    for i, chart in enumerate(shown):
        out.append(f'<g transform="translate({i % 2 * WIDTH} {36 + i // 2 * HEIGHT})">')
        out += [text(LEFT, 24, chart.title, 'font-size="13"'), *_chart(chart, _Box()), "</g>"]
    return "\n".join([*out, "</svg>", ""])


def figure(chart: Chart, about: str, width: float = 760, height: float = 320) -> str:
    """Return the SVG of one chart, without its title, which the page shows; `about` describes it."""
    left = float(LEFT)
    if isinstance(chart, HeatMap):
        left = max([LEFT, *(12 + 6.2 * len(row) for row in chart.rows)])
        height = max(120.0, 13.0 * len(chart.rows) + BOTTOM + 40)
    box = _Box(width, height, left, 20)
    return "\n".join([*_open(width, height, chart.title, about), *_chart(chart, box), "</svg>"])


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def short(value: float) -> str:
    """A number in a few characters: 2.5, 10 k, 1 M."""
    for power, sign in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g} {sign}"
    return f"{value:.6g}"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest value to above the highest, a few of them."""
    if _alike(low, high):
        room = max(0.5, 1e-6 * abs(low))
        low, high = low - room, high + room
    rough = (high - low) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 2.5, 5, 10) if unit * n >= rough * (1 - 1e-9))
    places = max(0, 2 - math.floor(math.log10(step)))
    return [round(n * step, places) for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _alike(low: float, high: float) -> bool:
    """Whether two values are too near to each other for round numbers between them."""
    return high - low <= 1e-12 * max(abs(low), abs(high))


def powers(low: float, high: float) -> list[float]:
    """Powers of ten around values above zero, at most nine of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    step = -(-(last - first) // 8)
    return [10.0**n for n in range(first, last + step, step)]


def _open(width: float, height: float, title: str, about: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="11" fill="#111827">',
        f"<title>{escape(title)}</title>",
        *([f"<desc>{escape(about)}</desc>"] if about else []),
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]


def _chart(chart: Chart, box: _Box) -> list[str]:
    if isinstance(chart, HeatMap):
        return _heat_map(chart, box)
    return _lines(chart, box) if isinstance(chart, Panel) else _bars(chart, box)


def _missing(box: _Box) -> list[str]:
    return [text(box.left, box.height / 2, "not measured in this run", f'fill="{GREY}"')]


# Lines


def _lines(panel: Panel, box: _Box) -> list[str]:
    curves = {name: _drawable(panel, curve) for name, curve in panel.curves.items()}
    verticals = {name: x for name, x in panel.verticals.items() if math.isfinite(x) and (x > 0 or not panel.log_x)}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return _missing(box)
    xs, ys = [*(x for x, _ in points), *verticals.values()], [y for _, y in points]
    x_axis = _Axis.around(xs, True) if panel.log_x else _Axis.along(xs)
    if panel.x_ticks:
        x_axis = _Axis(panel.x_ticks[0], panel.x_ticks[-1], panel.x_ticks, panel.log_x)
    y_axis = _Axis.around(ys, panel.logarithmic)
    box = _under_legend(box, list(curves))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = x_axis.share(x), y_axis.share(y)
        return box.left + across * (box.right - box.left), box.bottom - up * (box.bottom - box.top)

    out = [*_legend(list(curves), box), *_y_axis(y_axis, box), *_x_label(panel.x_label, box)]
    middle = 'text-anchor="middle"'
    out += [text(place(tick, ys[0])[0], box.bottom + 15, short(tick), middle) for tick in x_axis.ticks]
    for n, curve in enumerate(curves.values()):
        out += _curve([place(*point) for point in curve], n, panel.dots)
    for n, (name, x) in enumerate(verticals.items()):
        out += _vertical(place(x, ys[0])[0], box.top + 10 + 13 * n, name, box)
    for mark in panel.marks:
        if _drawable(panel, [(mark.x, mark.y)]):
            out += _mark(*place(mark.x, mark.y), mark.text, box)
    return out


def _drawable(panel: Panel, curve: Points) -> Points:
    finite = [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)]
    return [(x, y) for x, y in finite if (x > 0 or not panel.log_x) and (y > 0 or not panel.logarithmic)]


def _curve(places: Points, number: int, dots: bool) -> list[str]:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    if not places:
        return []
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    out = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>']
    shown = places if dots else places[-1:]
    return [*out, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in shown)]


def _vertical(x: float, y: float, name: str, box: _Box) -> list[str]:
    """A line from top to bottom, with its name on the side that has space."""
    to_left = x > (box.left + box.right) / 2
    anchor = f'fill="#374151" text-anchor="{"end" if to_left else "start"}" {HALO}'
    return [
        f'<path d="M{x:.1f} {box.top:.1f}V{box.bottom:.1f}" stroke="{GREY}" stroke-dasharray="3 3"/>',
        text(x + (-5 if to_left else 5), y, name, anchor),
    ]


def _mark(x: float, y: float, words: str, box: _Box) -> list[str]:
    """A ring around a point, with a label on the side that has space."""
    to_left = x > (box.left + box.right) / 2
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="#111827" stroke-width="1.2"/>'
    return [
        ring,
        text(x + (-9 if to_left else 9), y + 4, words, f'text-anchor="{"end" if to_left else "start"}" {HALO}'),
    ]


def _y_axis(axis: _Axis, box: _Box) -> list[str]:
    out = []
    for tick in axis.ticks:
        y = box.bottom - axis.share(tick) * (box.bottom - box.top)
        out.append(f'<path d="M{box.left:g} {y:.1f}H{box.right:g}" stroke="{LINE}"/>')
        out.append(text(box.left - 6, y + 4, short(tick), 'text-anchor="end"'))
    return out


def _x_label(label: str, box: _Box) -> list[str]:
    middle = (box.left + box.right) / 2
    return [text(middle, box.bottom + 30, label, f'text-anchor="middle" fill="{GREY}"')] if label else []


def _legend_rows(names: Sequence[str], box: _Box) -> list[list[tuple[float, int]]]:
    """The place of each name: rows of (x, number)."""
    rows: list[list[tuple[float, int]]] = [[]]
    x = box.left
    for number, name in enumerate(names):
        width = 34 + 6.0 * len(name)
        if rows[-1] and x + width > box.right:
            rows.append([])
            x = box.left
        rows[-1].append((x, number))
        x += width
    return rows


def _under_legend(box: _Box, names: Sequence[str]) -> _Box:
    rows = len(_legend_rows(names, box)) if len(names) > 1 else 0
    return _Box(box.width, box.height, box.left, box.top + LEGEND * rows)


def _legend(names: Sequence[str], box: _Box, *, filled: bool = False) -> list[str]:
    """Names above a chart that has more than one; `box` is what remains below the legend."""
    if len(names) < 2:
        return []
    rows = _legend_rows(names, box)
    out = []
    for n, row in enumerate(rows):
        y = box.top - LEGEND * (len(rows) - n) + 4
        for x, number in row:
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
            line = f'<path d="M{x:.1f} {y - 4:.1f}h20" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            block = f'<rect x="{x + 6:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>'
            out += [block if filled else line, text(x + 24, y, names[number])]
    return out


# Bars


def _bars(bars: Bars, box: _Box) -> list[str]:
    there = [v for row in bars.series.values() for v in row if _has_bar(v, bars)]
    if not there:
        return _missing(box)
    low = min(there) if bars.logarithmic else min(0.0, *there)
    axis = _Axis.around([low, *there], bars.logarithmic)
    box = _under_legend(box, list(bars.series))
    out = [*_legend(list(bars.series), box, filled=True), *_y_axis(axis, box), *_x_label(bars.x_label, box)]
    room = (box.right - box.left) / max(len(bars.categories), 1)
    every = -(-len(bars.categories) * 40 // int(box.right - box.left))
    for n, category in enumerate(bars.categories):
        left = box.left + n * room
        if n % max(every, 1) == 0:
            out.append(text(left + room / 2, box.bottom + 15, category, 'text-anchor="middle"'))
        for m, values in enumerate(bars.series.values()):
            wide = 0.8 * room / len(bars.series)
            if _has_bar(value := values[n], bars):
                out += _bar(left + 0.1 * room + m * wide, wide, value, axis, box, COLOURS[m % len(COLOURS)])
                if bars.numbers:
                    y = box.bottom - axis.share(value) * (box.bottom - box.top)
                    middle = left + 0.1 * room + (m + 0.5) * wide
                    out.append(text(middle, y - 4, short(float(f"{value:.3g}")), 'text-anchor="middle" font-size="10"'))
    return out


def _has_bar(value: float | None, bars: Bars) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and (value > 0 or not bars.logarithmic)


def _bar(x: float, width: float, value: float, axis: _Axis, box: _Box, colour: str) -> list[str]:
    height = max(axis.share(value) * (box.bottom - box.top), 0.5)
    size = f'width="{max(width - 1, 1):.1f}" height="{height:.1f}"'
    return [f'<rect x="{x:.1f}" y="{box.bottom - height:.1f}" {size} fill="{colour}"/>']


# Heat maps


def _heat_map(chart: HeatMap, box: _Box) -> list[str]:
    there = [value for row in chart.values for value in row if value is not None and math.isfinite(value)]
    if not there:
        return _missing(box)
    low, high = min(there), max(there)
    colour = _colouring(low, high)
    wide = (box.right - box.left) / max(len(chart.columns), 1)
    tall = (box.bottom - box.top - 14) / max(len(chart.rows), 1)
    top = box.top + 14
    out = [*_scale(low, high, chart.unit, box), *_x_label(chart.x_label, box)]
    every = max(1, -(-len(chart.rows) * 11 // int(box.bottom - top)))
    for n, (name, row) in enumerate(zip(chart.rows, chart.values, strict=True)):
        y = top + n * tall
        if n % every == 0:
            out.append(text(box.left - 5, y + tall / 2 + 4, name, 'text-anchor="end" font-size="10"'))
        for m, value in enumerate(row):
            size = f'width="{wide + 0.3:.1f}" height="{tall + 0.3:.1f}"'
            fill = NONE if value is None or not math.isfinite(value) else colour(value)
            out.append(f'<rect x="{box.left + m * wide:.1f}" y="{y:.1f}" {size} fill="{fill}"/>')
    longest = max(len(column) for column in chart.columns)
    apart = max(1, math.ceil((8 + 6.2 * longest) / wide))
    named = range(0, len(chart.columns), apart)
    middle = 'text-anchor="middle"'
    return [*out, *(text(box.left + (m + 0.5) * wide, box.bottom + 15, chart.columns[m], middle) for m in named)]


def _colouring(low: float, high: float) -> Callable[[float], str]:
    def colour(value: float) -> str:
        at = (value - low) / (high - low) * (len(RAMP) - 1) if high > low else 0.0
        first = min(int(at), len(RAMP) - 2)
        mixed = (a + (b - a) * (at - first) for a, b in zip(RAMP[first], RAMP[first + 1], strict=True))
        return "#" + "".join(f"{round(channel):02x}" for channel in mixed)

    return colour


def _scale(low: float, high: float, unit: str, box: _Box) -> list[str]:
    """The colour scale: a strip from the lowest to the highest, above the cells."""
    y, at, colour = box.top - 12, box.right - 225 - 6 * len(unit), _colouring(low, high)
    cells = [
        f'<rect x="{at + 60 + 6 * n}" y="{y:.1f}" width="6.3" height="9" fill="{colour(low + (high - low) * n / 19)}"/>'
        for n in range(20)
    ]
    ends = (text(at + 55, y + 8, f"{low:.3g}", 'text-anchor="end"'), text(at + 185, y + 8, f"{high:.3g} {unit}"))
    return [*cells, *ends]
