"""A plot without a plotting library: curves over two logarithmic axes, as an SVG file that needs nothing else."""

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 50, 60
COLOURS = ("#6b7280", "#c2410c", "#1d4ed8", "#15803d", "#7e22ce")


@dataclass(frozen=True)
class Curve:
    """Points by ascending x; those that were not measured are drawn hollow, and lines to them dashed."""

    name: str
    points: list[tuple[float, float, bool]]  # x, y, measured


def draw(title: str, x_name: str, y_name: str, curves: list[Curve], x_ticks: dict[float, str]) -> str:
    """Return the SVG."""
    xs, ys = ([point[i] for curve in curves for point in curve.points] for i in (0, 1))
    x_from, x_to = math.log10(min(xs)), math.log10(max(xs))
    y_from, y_to = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_from) / (x_to - x_from)
        up = (math.log10(y) - y_from) / (y_to - y_from)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#111827">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 26, title, 'font-size="15"'),
    ]
    for power in range(y_from, y_to + 1):
        x, y = place(10**x_from, 10.0**power)
        out.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        out.append(text(x - 8, y + 4, f"{10.0**power:g}", 'text-anchor="end"'))
    for tick, words in x_ticks.items():
        x, y = place(tick, 10.0**y_from)
        out.append(f'<path d="M{x:.1f} {y:.1f}V{TOP}" stroke="#f3f4f6"/>')
        out.append(text(x, y + 18, words, 'text-anchor="middle"'))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_name, 'text-anchor="middle"'))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(text(18, middle, y_name, f'text-anchor="middle" transform="rotate(-90 18 {middle:.1f})"'))
    ends = _apart([place(curve.points[-1][0], curve.points[-1][1])[1] for curve in curves])
    for curve, colour, end in zip(curves, COLOURS, ends, strict=False):
        placed = [(*place(x, y), measured) for x, y, measured in curve.points]
        for (x0, y0, known), (x1, y1, known_too) in pairwise(placed):
            dashes = "" if known and known_too else 'stroke-dasharray="5 4"'
            out.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{colour}" stroke-width="2" {dashes}/>')
        for x, y, measured in placed:
            fill = colour if measured else "white"
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>')
        out.append(text(WIDTH - RIGHT + 12, end + 4, curve.name, f'fill="{colour}"'))
    return "\n".join([*out, "</svg>", ""])


def _apart(places: list[float], least: float = 16) -> list[float]:
    """The same heights, moved down where two would overlap."""
    out = list(places)
    at = -math.inf
    for i in sorted(range(len(places)), key=places.__getitem__):
        at = out[i] = max(places[i], at + least)
    return out
