"""The report of cluster.py with --device: measurements, computed times of other links, and the goals.

    python -m benchmarks cluster --report POINTS... [--json FILE]

prints the report of the points that one or more runs have saved, and writes them as JSON.

The time of a link is computed from stages that each end on the device before the next begins. They are those of
cluster_stages, where each end has the GPU to itself, if its points are given; otherwise those of one more sync
on loopback, in which both ranks share one GPU:

    ours          max(source, bytes / link, receiver) + (the other two) / buckets + write + meet + verdict
    index+value   max(compare, bytes / link, write) + (the other two) / buckets
    dense         bytes / link

The first is the library's own cost model (group/cost_model.py). source is diff_s + encode_s + digest_s of the source,
and receiver is prepare_s + undo_s + digest_s of the receiver. None includes copies between pinned memory and the
device, which messages over NCCL do not need. The others are computed with the same overlap, without the two rounds of
control messages (meet and verdict), and dense without packing.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.report import json_line, table
from benchmarks.harness.save import write

Point = dict[str, Any]

GIGABIT = 1e9 / 8
LINKS = {  # bytes a second
    "0.1 Gbit/s": 0.1 * GIGABIT,
    "1 Gbit/s": GIGABIT,
    "10 Gbit/s": 10 * GIGABIT,
    "100 Gbit/s": 100 * GIGABIT,
    "400 Gbit/s": 400 * GIGABIT,
    "NVLink, 400 GB/s": 400e9,
}
FAST = ("400 Gbit/s", "NVLink, 400 GB/s")
PAIRS, DENSE = "index+value bucketed", "dense, computed"
HELD = ("ours, dense", "ours, plain", "ours, gap", "ours, coded")
SHARE = 0.15  # of a sync that digest, undo and verdict may take
NEAR = 1.10
ROUNDS = ("meet_s", "verdict_s")


def progress(point: Point) -> str:
    chosen = f" ({', '.join(dict.fromkeys(point['methods']))})" if point["way"] == "ours" else ""
    return (
        f"{point['model']}, {point['density']:.1%}, {point['link']}: {point['way']}{chosen}: "
        f"{1e3 * point['seconds']:.1f} ms, {point['sent_bytes'] / 1e6:.4g} MB, {point['messages']:g} messages"
    )


class Points:
    """Points by model, method, density and link."""

    def __init__(self, points: list[Point]) -> None:
        self.all = [point for point in points if point["way"] not in ("choices", "about", "alone")]
        alone = (one for one in points if one["way"] == "alone")
        self.alone = {(one["model"], one["method"], one["density"]): one["staged"] for one in alone}
        self.runs = [point for point in points if point["way"] == "about"]
        self.choices = {(one["model"], one["density"]): one["choices"] for one in points if one["way"] == "choices"}

    def find(self, model: str, way: str, density: float, link: str = "lo") -> Point | None:
        key = (model, way, density, link)
        named = (one for one in self.all if (one["model"], one["way"], one["density"], one["link"]) == key)
        return next(named, None)

    def models(self) -> list[str]:
        return list(dict.fromkeys(one["model"] for one in self.all))

    def densities(self, model: str) -> list[float]:
        return sorted({one["density"] for one in self.all if one["model"] == model and one["density"]})

    def some(self, model: str, density: float, link: str = "lo") -> list[Point]:
        key = (model, density, link)
        return [one for one in self.all if (one["model"], one["density"], one["link"]) == key]


# -- what was measured ---------------------------------------------------------------------------------------------


def measured(points: Points, model: str, density: float) -> str:
    """Every method on loopback."""
    pairs = points.find(model, PAIRS, density)
    rows = [
        [
            name_of(one),
            f"{one['messages']:g}",
            f"{one['sent_bytes'] / 1e6:.4g}",
            f"{1e3 * one['seconds']:.1f}",
            f"{1e3 * min(one['all']):.1f} to {1e3 * max(one['all']):.1f}, {len(one['all'])}",
            f"{pairs['seconds'] / one['seconds']:.2f}" if pairs else "–",
            *(gigabytes(one, f"{end}_{what}") for what in ("peak", "kept") for end in ("source", "receiver")),
        ]
        for one in points.some(model, density)
    ]
    head = ["method", "messages", "MB", "ms", "least to most, of", "× index+value bucketed"]
    head += ["peak GB, source", "peak GB, receiver", "kept GB, source", "kept GB, receiver"]
    return table(head, rows)


def name_of(point: Point) -> str:
    """The method and, where it chooses automatically, its choice."""
    return str(point["way"]) + (f" ({point['method']})" if point["way"] == "ours" else "")


def gigabytes(point: Point, name: str) -> str:
    size = point.get(f"{name}_bytes")
    return "–" if size is None else f"{size / 1e9:.2f}"


def slow_links(points: Points, model: str) -> str:
    """Measured times of shaped links, and the times that the formula gives for the measured rate of the link."""
    rows = []
    for one in points.all:
        if one["model"] == model and one["density"]:
            by_formula = computed(points, one, one["rate"] / 8)
            rows.append(
                [
                    f"{one['link']}{' Gbit/s' if one['link'] != 'lo' else ''}",
                    f"{one['density']:.1%}",
                    name_of(one),
                    f"{one['rate'] / 1e9:.3g}",
                    f"{len(one['all'])}",
                    f"{1e3 * one['seconds']:.1f}",
                    "–" if by_formula is None else f"{1e3 * by_formula:.1f}",
                    "–" if by_formula is None else f"{by_formula / one['seconds']:.2f}",
                ]
            )
    head = ["link", "changed", "method", "Gbit/s it gave", "syncs", "measured ms", "computed ms", "computed ÷ measured"]
    return table(head, rows)


def stages(points: Points, model: str) -> str:
    """Milliseconds of each stage of our methods on loopback, where each stage ends before the next begins."""
    names = ["source_diff_s", "source_encode_s", "source_digest_s", "receiver_prepare_s", "receiver_undo_s"]
    names += ["receiver_digest_s", "receiver_apply_s", *ROUNDS]
    rows = []
    for one in points.all:
        if one["model"] == model and one["link"] == "lo" and one["way"].startswith("ours") and one["density"]:
            told = name_of(one)
            known = ended(points, one) | {name: one[name] for name in ROUNDS}
            milliseconds = [f"{1e3 * known.get(name, 0.0):.1f}" for name in names]
            rows.append([f"{told}, {one['density']:.1%}", *milliseconds, f"{1e3 * one['seconds']:.1f}"])
    short = [name.removesuffix("_s").replace("_", " ") for name in names]
    return table(["method, changed", *short, "whole sync"], rows)


def staged(points: Points, model: str) -> str:
    """The stages of index+value bucketed, measured one by one."""
    rows = []
    for density in points.densities(model):
        one = points.find(model, PAIRS, density)
        if one and "staged" in one:
            names = ["source_diff_s", "source_staging_s", "source_wire_s", "receiver_staging_s", "receiver_apply_s"]
            rows.append([f"{density:.1%}", *(f"{1e3 * one['staged'][name]:.1f}" for name in names)])
    head = ["changed", "compare, gather", "to the host", "gloo", "to the device", "write"]
    return table(head, rows)


# -- other links ---------------------------------------------------------------------------------------------------


def ended(points: Points, one: Point) -> Point:
    """A point with the stages of its method, each ended on the device, where they are known; else as reported.

    Stages of cluster_stages, which had the device to itself, are preferred.
    """
    way = f"ours, {one['method']}" if one["way"] == "ours" else one["way"]
    if alone := points.alone.get((one["model"], way, one["density"])):
        return {**one, **alone, "sent_bytes": one["sent_bytes"]}
    known = points.find(one["model"], way, one["density"])
    return {**one, **known["staged"]} if known and "staged" in known else one


def work_of(points: Points, one: Point, checked: bool = True) -> tuple[float, float, float, float] | None:
    """Seconds at the source, at the receiver, of the write, and of rounds; None where stages were not measured.

    Without copies between pinned memory and the device, which messages over NCCL do not need.
    """
    known = ended(points, one)
    if one["way"].startswith("ours"):
        source = sum(known[f"source_{what}_s"] for what in ("diff", "encode", *(["digest"] if checked else [])))
        receiver = sum(known[f"receiver_{what}_s"] for what in ("prepare", *(["undo", "digest"] if checked else [])))
        receiver -= known.get("receiver_staging_s", 0.0)
        rounds = sum(one.get(name, 0.0) for name in (ROUNDS if checked else ROUNDS[:1]))
        return source, receiver, known["receiver_apply_s"], rounds
    if one["way"] == PAIRS:
        return (known["source_diff_s"], known["receiver_apply_s"], 0.0, 0.0) if "source_diff_s" in known else None
    return (0.0, 0.0, 0.0, 0.0) if one["way"].startswith("dense") else None


def computed(points: Points, one: Point, rate: float, checked: bool = True) -> float | None:
    """Computed seconds of a sync over a link of `rate` bytes a second; if not `checked`, without digests and undo."""
    work = work_of(points, one, checked)
    if work is None:
        return None
    source, receiver, apply, rounds = work
    parts = [source, one["sent_bytes"] / rate, receiver]
    longest = max(parts)
    buckets = max(1, one.get("buckets", 1))
    return float(longest + (sum(parts) - longest) / buckets + apply + rounds)


def on_link(points: Points, model: str, density: float, rate: float) -> dict[str, float]:
    """Computed seconds of every method with known stages; dense takes the time of its bytes alone."""
    out = {}
    for way in (PAIRS, *HELD):
        one = points.find(model, way, density)
        seconds = None if one is None else computed(points, one, rate)
        if seconds is not None:
            out[way] = seconds
    weights = next(one["weights"] for one in points.all if one["model"] == model)
    return {DENSE: 2 * weights / rate, **out}


def links(points: Points, model: str, density: float) -> str:
    """Milliseconds by link and method, and what the cost model would choose."""
    rows, ways = [], list(on_link(points, model, density, 1.0))
    for name, rate in LINKS.items():
        found = on_link(points, model, density, rate)
        chosen = choice(points, model, density, name)
        taken = found.get(f"ours, {chosen}")
        best = min(found, key=found.__getitem__)
        pairs = found.get(PAIRS)
        rows.append(
            [
                name,
                *(f"{1e3 * found[way]:.4g}" for way in ways),
                chosen or "–",
                "–" if taken is None or pairs is None else f"{pairs / taken:.2f}",
                "–" if taken is None else f"{taken / found[best]:.2f} ({best})",
            ]
        )
    return table(["link", *ways, "ours chooses", "× index+value bucketed", "÷ the best of all"], rows)


def choice(points: Points, model: str, density: float, link: str) -> str | None:
    known = points.choices.get((model, density))
    return known[link]["method"] if known else None


# -- what was asked ------------------------------------------------------------------------------------------------


CHECKS = ("source_digest_s", "receiver_digest_s", "receiver_undo_s")


def checks_s(points: Points, one: Point) -> float:
    """Digests, undo and verdict. A source that codes counts its digests in encode_s.

    The verdict is the shorter of the two ranks' times from the end of their work to the commit: the rank that arrives
    last waits only for the round of messages itself.
    """
    known = ended(points, one)
    return float(sum(known.get(name, 0.0) for name in CHECKS) + one.get("verdict_s", 0.0))


def shares(points: Points, model: str) -> str:
    rows = []
    for one in points.all:
        if one["model"] != model or one["link"] != "lo" or not one["way"].startswith("ours") or not one["density"]:
            continue
        fast = computed(points, one, LINKS[FAST[1]])
        assert fast is not None
        told = name_of(one)
        known = ended(points, one)
        parts = [*(known.get(name, 0.0) for name in CHECKS), one.get("verdict_s", 0.0)]
        together = checks_s(points, one)
        rows.append(
            [
                f"{told}, {one['density']:.1%}",
                *(f"{1e3 * seconds:.2f}" for seconds in parts),
                f"{1e3 * together:.2f}",
                f"{together / one['seconds']:.1%}",
                f"{together / fast:.1%}",
                f"{hides_not(points, one):.1%}",
            ]
        )
    head = ["method, changed", "digest, source", "digest, receiver", "undo", "verdict", "together, ms"]
    return table([*head, "of the sync, gloo", "of the sync, NVLink computed", "longer by, NVLink computed"], rows)


Check = tuple[bool, str, dict[str, Any]]


def checks(points: Points) -> Iterator[Check]:
    """Yield (whether it was reached, a sentence, figures) for every goal."""
    for model in points.models():
        for link, asked in (("0.1", 5.0), ("1", 2.0)):
            yield from faster(points, model, link, asked)
        for density in points.densities(model):
            yield from near_best(points, model, density)
        yield from share_check(points, model)


def faster(points: Points, model: str, link: str, asked: float) -> Iterator[Check]:
    pairs = points.find(model, PAIRS, 0.01, link)
    for way in ("ours", "ours, coded"):
        ours = points.find(model, way, 0.01, link)
        if pairs and ours:
            ratio = pairs["seconds"] / ours["seconds"]
            said = f"{model}, 1 %, {link} Gbit/s, measured: {PAIRS} ÷ {way} = {ratio:.2f} (asked ≥ {asked:g})"
            yield ratio >= asked, said, {f"{model} {link} {way} measured": ratio}
    rate = float(link) * GIGABIT
    found = on_link(points, model, 0.01, rate)
    if PAIRS in found and "ours, coded" in found:
        ratio = found[PAIRS] / found["ours, coded"]
        said = f"{model}, 1 %, {link} Gbit/s, computed: {PAIRS} ÷ ours, coded = {ratio:.2f} (asked ≥ {asked:g})"
        yield ratio >= asked, said, {f"{model} {link} computed": ratio}


def near_best(points: Points, model: str, density: float) -> Iterator[Check]:
    for link in FAST:
        chosen = choice(points, model, density, link)
        found = on_link(points, model, density, LINKS[link])
        taken = found.get(f"ours, {chosen}")
        if chosen is None:
            continue
        about = f"{model}, {density:.1%}, {link}, computed: ours chooses {chosen}"
        if taken is None:
            yield False, f"{about}, of which this run has no time", {}
            continue
        own = min(seconds for way, seconds in found.items() if way in HELD)
        ratio = taken / min(found.values())
        said = f"{about}, {ratio:.2f} of the best of all, {taken / own:.2f} of the best of ours (asked ≤ {NEAR})"
        fine = chosen in ("plain", "dense") and ratio <= NEAR
        yield fine, said, {f"{model} {density:.3g} {link}": ratio, f"{model} {density:.3g} {link} own": taken / own}


def hides_not(points: Points, one: Point) -> float:
    """The share of a sync over NVLink that would be saved without digest, undo and verdict."""
    fast, bare = (computed(points, one, LINKS[FAST[1]], checked) for checked in (True, False))
    return 1 - bare / fast if fast and bare else 0.0


def share_check(points: Points, model: str) -> Iterator[Check]:
    ours = [
        one
        for one in points.all
        if one["model"] == model and one["link"] == "lo" and one["way"].startswith("ours") and one["density"]
    ]
    ways: list[tuple[str, Callable[[Point], float]]] = [
        ("over gloo, measured", lambda one: float(one["seconds"])),
        ("over NVLink, computed", lambda one: computed(points, one, LINKS[FAST[1]]) or 1.0),
    ]
    found = [(where, [(checks_s(points, one) / whole(one), one) for one in ours]) for where, whole in ways]
    found.append(
        ("over NVLink, computed, beyond what else hides them", [(hides_not(points, one), one) for one in ours])
    )
    for where, pairs in found if ours else []:
        share, worst = max(pairs, key=lambda pair: pair[0])
        middle = statistics.median(share for share, _ in pairs)
        said = (
            f"{model}, digest, undo and verdict {where}: at most {share:.1%} of a sync "
            f"({name_of(worst)}, {worst['density']:.1%}), median {middle:.1%} (asked ≤ {SHARE:.0%})"
        )
        yield share <= SHARE, said, {f"{model} share {where}": share}


# -- all of it -----------------------------------------------------------------------------------------------------


def sections(points: Points) -> Iterator[tuple[str, str, str]]:
    """Yield (name, title, table)."""
    for model in points.models():
        first = next(one for one in points.all if one["model"] == model)
        about = f"{model}: {first['weights']:,} weights in {first['tensors']} tensors, {first['device']}"
        for density in points.densities(model):
            share = statistics.median(one["changed"] / one["weights"] for one in points.some(model, density))
            title = f"{about}, {density:.1%} changed ({share:.3%}), both ranks on it, gloo over loopback"
            yield f"{model} {density:.1%}", title, measured(points, model, density)
        yield f"{model} stages", f"{model}: stages of ours, ms", stages(points, model)
        yield f"{model} staged", f"{model}: stages of {PAIRS}, one after the other, ms", staged(points, model)
        yield f"{model} links", f"{model}: computed and measured times", slow_links(points, model)
        for density in points.densities(model):
            title = f"{model}, {density:.1%} changed: computed for other links, ms"
            yield f"{model} {density:.1%} computed", title, links(points, model, density)
        yield f"{model} shares", f"{model}: what checking takes", shares(points, model)


def verdicts(points: Points) -> str:
    return "\n".join(f"- {'yes' if fine else 'NO '} {what}" for fine, what, _ in checks(points))


def report(points: list[Point]) -> None:
    """Print everything."""
    known = Points(points)
    print("\nTimes are medians, in ms from a barrier until both ranks and their devices are done.\n")
    for _, title, content in sections(known):
        print(f"**{title}**\n\n{content}\n")
    print(verdicts(known) + "\n")
    for one in known.runs:
        left = "; ".join(one["missing"]) or "nothing"
        print(f"A run of {one['spent_s']:.0f} s at commit {one['commit']}. Not measured: {left}")


def report_files(paths: Sequence[Path], json_file: Path | None) -> None:
    """Print the report of the points in some files; write them as JSON."""
    points = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    report(points)
    if json_file:
        write(json_file, [json.loads(json_line({"bench": "cluster, GPU", "points": points}))])
