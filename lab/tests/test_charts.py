"""Charts: they parse, they escape, and points are where their values say."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from pulsesync_lab.charts import Bars, Chart, ChartPoint, HeatMap, Panel, draw, figure, powers, short, ticks

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert('x')</script> & \"more\""


def parsed(chart: Chart) -> ET.Element:
    return ET.fromstring(figure(chart, "what it shows"))


def circles(root: ET.Element) -> list[tuple[float, float]]:
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]


def words(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.24, 0.61), (5.0, 5.0), (1.0, 100.0), (99.1, 99.4), (-3, 8)])
def test_ticks_are_a_few_round_numbers_around_the_values(low: float, high: float) -> None:
    chosen = ticks(low, high)
    assert chosen[0] <= low
    assert chosen[-1] >= high
    assert 2 <= len(chosen) <= 7


def test_ticks_of_nearly_equal_values_differ() -> None:
    chosen = ticks(99.99991, 99.99993)
    assert len(set(chosen)) == len(chosen)
    assert chosen[0] <= 99.99991 <= 99.99993 <= chosen[-1]


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (3e-7, 80.0), (1e-38, 1e3), (900.0, 1_000_001.0)])
def test_powers_are_at_most_nine_and_around_the_values(low: float, high: float) -> None:
    chosen = powers(low, high)
    assert chosen[0] <= low
    assert chosen[-1] >= high
    assert 2 <= len(chosen) <= 9


@pytest.mark.parametrize(("value", "said"), [(2.5, "2.5"), (10_000, "10 k"), (1_470_040, "1.47 M"), (3e-06, "3e-06")])
def test_numbers_are_short(value: float, said: str) -> None:
    assert short(value) == said


def test_a_point_lies_where_its_value_says() -> None:
    (low, middle, high) = circles(parsed(Panel("p", {"a": [(0, 0.0), (5, 50.0), (10, 100.0)]}, dots=True)))
    assert middle[0] == pytest.approx((low[0] + high[0]) / 2, abs=0.2)
    assert middle[1] == pytest.approx((low[1] + high[1]) / 2, abs=0.2)
    assert low[1] > high[1]


def test_on_logarithmic_axes_equal_ratios_are_equally_far() -> None:
    points = [(1, 1e-3), (10, 1e-1), (100, 10.0)]
    (low, middle, high) = circles(parsed(Panel("p", {"a": points}, logarithmic=True, log_x=True, dots=True)))
    assert middle[0] - low[0] == pytest.approx(high[0] - middle[0], abs=0.2)
    assert middle[1] - low[1] == pytest.approx(high[1] - middle[1], abs=0.2)


def test_what_is_not_above_zero_is_left_out_of_a_logarithmic_axis() -> None:
    assert len(circles(parsed(Panel("p", {"a": [(1, 0.0), (2, 5.0), (3, -1.0)]}, logarithmic=True, dots=True)))) == 1
    assert "not measured in this run" in words(parsed(Panel("p", {"a": [(1, 0.0)]}, logarithmic=True)))


def test_several_curves_have_names_colours_and_dashes_of_their_own() -> None:
    root = parsed(Panel("p", {f"curve {n}": [(0, n), (1, n + 1)] for n in range(4)}))
    drawn = [path.attrib for path in root.iter(f"{SVG}path") if path.attrib.get("fill") == "none"]
    assert len({path["stroke"] for path in drawn}) == len({path["stroke-dasharray"] for path in drawn}) == 4
    assert {f"curve {n}" for n in range(4)} <= set(words(root))


def test_a_single_curve_needs_no_legend() -> None:
    assert "alone" not in words(parsed(Panel("p", {"alone": [(0, 1), (1, 2)]})))


def test_marks_and_verticals_stay_inside_the_picture() -> None:
    points = [(n, 99 + math.sin(n)) for n in range(50)]
    for at in (0, 25, 49):
        mark = ChartPoint(*points[at], "lowest: 98.49 % at step 10")
        root = parsed(Panel("p", {"a": points}, marks=[mark], verticals={"warm-up ends": at}))
        for node in root.iter(f"{SVG}text"):
            width, x = 6.5 * len(node.text or ""), float(node.attrib["x"])
            side = node.attrib.get("text-anchor", "start")
            left = x - {"start": 0, "middle": width / 2, "end": width}[side]
            assert -1 <= left <= left + width <= 775, node.text


def test_bars_are_as_high_as_their_values() -> None:
    root = parsed(Bars("b", ["one", "two", "none"], {"s": [1.0, 4.0, None]}))
    heights = [float(r.attrib["height"]) for r in root.iter(f"{SVG}rect") if r.attrib["fill"].startswith("#")]
    assert len(heights) == 2
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.01)


def test_a_heat_map_is_darkest_where_it_is_highest_and_grey_where_nothing_is() -> None:
    root = parsed(HeatMap("h", ["a", "b"], ["1", "2"], [[0.0, None], [1.0, 3.0]]))
    cells = [r.attrib["fill"] for r in root.iter(f"{SVG}rect") if r.attrib["fill"].startswith("#")][-4:]
    bright = [sum(int(cell[n : n + 2], 16) for n in (1, 3, 5)) for cell in cells]
    assert cells[1] == "#f3f4f6"
    assert bright[0] > bright[2] > bright[3]


@pytest.mark.parametrize(
    "chart",
    [
        Panel(
            HOSTILE,
            {HOSTILE: [(0, 1)], "b": [(1, 2)]},
            x_label=HOSTILE,
            marks=[ChartPoint(0, 1, HOSTILE)],
            verticals={HOSTILE: 0.5},
        ),
        Bars(HOSTILE, [HOSTILE], {HOSTILE: [1.0], "b": [2.0]}, x_label=HOSTILE),
        HeatMap(HOSTILE, [HOSTILE], [HOSTILE], [[1.0]], HOSTILE, HOSTILE),
    ],
)
def test_every_text_is_escaped(chart: Chart) -> None:
    drawn = figure(chart, HOSTILE)
    ET.fromstring(drawn)
    assert "<script" not in drawn
    assert not re.search(r'="[^"]*<', drawn)


@pytest.mark.parametrize("chart", [Panel("p", {}), Bars("b", [], {}), HeatMap("h", [], [], [])])
def test_what_has_no_values_says_so(chart: Chart) -> None:
    assert words(parsed(chart)) == ["not measured in this run"]


def test_a_figure_has_title_and_description() -> None:
    root = parsed(Panel("its title", {"a": [(0, 1)]}))
    assert [root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")] == ["its title", "what it shows"]


def test_several_charts_share_a_picture() -> None:
    shown: list[Chart] = [
        Panel("one", {"a": [(0, 1)]}),
        Bars("two", ["x"], {"s": [1.0]}),
        HeatMap("three", ["r"], ["c"], [[1.0]]),
    ]
    root = ET.fromstring(draw(shown, "all"))
    groups = [child for child in root if child.tag == f"{SVG}g"]
    assert [next(iter(group)).text for group in groups] == ["one", "two", "three"]


@pytest.mark.parametrize("value", [99.3, 1e17, -4e-9])
def test_values_that_are_next_to_each_other_have_ticks_as_if_equal(value: float) -> None:
    near = math.nextafter(value, math.inf)
    for high in (value, near):
        chosen = ticks(value, high)
        assert chosen[0] < value <= high < chosen[-1]
    assert circles(parsed(Panel("p", {"a": [(value, value), (near, near)]})))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(odd: float) -> None:
    curve = [(0, odd), (odd, 1.0), (1, 1.0), (2, 3.0)]
    root = parsed(Panel("p", {"a": curve}, marks=[ChartPoint(1, odd, "m")], verticals={"v": odd}, dots=True))
    assert len(circles(root)) == 2
    assert "not measured in this run" in words(parsed(Panel("p", {"a": [(0, odd)]})))
    for chart in (Bars("b", ["x", "y"], {"s": [odd, 1.0]}), HeatMap("h", ["r"], ["x", "y"], [[odd, 1.0]])):
        assert "nan" not in figure(chart, "")
