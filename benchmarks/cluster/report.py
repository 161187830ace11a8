"""The report of cluster.py: measurements, and the cost model compared with them.

A point is one case (weights, cut into tensors, changed to a density) on one link; `ways` has, by method, the figures of
a sync.
"""

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.harness.report import json_line, provenance, table

Point = dict[str, Any]

OTHERS = ("dense per tensor", "dense bucketed", "index+value per tensor", "index+value bucketed")
WORK = tuple(f"source_{what}_s" for what in ("copy", "diff", "encode", "digest")) + tuple(
    f"receiver_{what}_s" for what in ("copy", "prepare", "undo", "digest", "apply")
)


def progress(point: Point) -> str:
    taken = ", ".join(f"{way} {1e3 * found['seconds']:.1f}" for way, found in point["ways"].items())
    return f"{point['sweep']}: {point['case']}, {point['link']}: ms: {taken}"


def fastest(point: Point, among: Iterable[str] | None = None, by: str = "seconds") -> float:
    return float(min(found[by] for way, found in point["ways"].items() if among is None or way in among))


def report(points: list[Point], given: int, rounds: int) -> None:
    """Print everything. given: the untimed syncs of our methods at each point, before the timed ones."""
    print(
        f"\nTimes are medians of up to {rounds} syncs (fewer where one takes long), in ms from a barrier until both"
        f" are done; × is over the fastest in the column.\nOurs had {given} syncs at each point before, the first one"
        " of the full state. MB are what a method hands to torch for a receiver, on the wire what the link carried.\n"
    )
    for case in cases_of(points):
        print(case_table(case) + "\n")
    print(cost_model(points) + "\n")
    told = list(checks(points))
    print("\n".join(f"- {'yes' if fine else 'NO '} {what}" for fine, what, _ in told) + "\n")
    figures = {name: figure for _, _, named in told for name, figure in named.items()}
    about = provenance("torch") | {"rounds": rounds, "syncs_before": given}
    print(json_line({"bench": "cluster", **about, "checks": figures, "points": points}))


def cases_of(points: list[Point]) -> list[list[Point]]:
    out: dict[Any, list[Point]] = {}
    for point in points:
        out.setdefault((point["sweep"], point["case"], point["weights"]), []).append(point)
    return list(out.values())


# -- what was measured ---------------------------------------------------------------------------------------------


def case_table(case: list[Point]) -> str:
    """A table of methods by links, for one case."""
    first = case[0]
    links = [f"{point['link']}{'' if point['link'] in ('lo', 'full') else ' Gbit/s'}" for point in case]
    rows = []
    for way in first["ways"]:
        found = [point["ways"][way] for point in case]
        carried = [one["carried_bytes"] for one in found if one["carried_bytes"]]
        rows.append(
            [
                way,
                span(f"{one['messages']:g}" for one in found),
                span(f"{one['sent_bytes'] / 1e6:.3g}" for one in found),
                span(f"{size / 1e6:.3g}" for size in carried),
                *(cell(point, way) for point in case),
            ]
        )
    title = (
        f"**{first['case']}** ({first['sweep']}): {first['weights']:,} weights in {first['tensors']:,} tensors, "
        f"{first['density']:.3%} changed a step"
    )
    return f"{title}\n\n{table(['method', 'messages', 'MB', 'MB on the wire', *links], rows)}"


def span(values: Iterable[Any]) -> str:
    """A value, or the range of several."""
    known = sorted({str(value) for value in values}, key=float)
    return "–" if not known else known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"


def cell(point: Point, way: str) -> str:
    found = point["ways"][way]
    chosen = f" {found['method']}" if way == "ours" and found["method"] else ""
    return f"{1e3 * found['seconds']:.1f} ×{found['seconds'] / fastest(point):.2f}{chosen}"


# -- the cost model ------------------------------------------------------------------------------------------------


def work_s(found: dict[str, Any]) -> float:
    """Seconds of work at both ends, without the link."""
    return float(sum(found.get(name, 0.0) for name in WORK))


def modelled_bytes(way: str, point: Point) -> float:
    """S for dense, S/X with X = 1/(3ρ) for index and value; for ours the bytes that it sent."""
    dense = 2.0 * float(point["weights"])
    if "dense" in way:
        return dense
    sent = point["ways"][way]["sent_bytes"]
    return dense * 3 * float(point["density"]) if way.startswith("index") else float(sent)


def cost_model(points: list[Point]) -> str:
    """A table of the modelled time, bytes over the link plus work at both ends, and the measured one."""
    rows = []
    for point in points:
        if point["sweep"] not in ("links", "recorded"):
            continue
        for way in ("dense bucketed", "index+value bucketed", "ours, plain", "ours, gap", "ours, coded"):
            if way not in point["ways"]:
                continue
            found, size = point["ways"][way], modelled_bytes(way, point)
            predicted = 8 * size / point["rate"] + work_s(found)
            bits = "–" if "dense" in way else f"{8 * found['sent_bytes'] / found['changed']:.1f}"
            rows.append(
                [
                    f"{point['case'].split(',')[0]}, {point['link']}",
                    way,
                    f"{2 * point['weights'] / size:.1f}",
                    f"{2 * point['weights'] / found['sent_bytes']:.1f}",
                    bits,
                    f"{1e3 * work_s(found):.1f}",
                    f"{1e3 * predicted:.1f}",
                    f"{1e3 * found['seconds']:.1f}",
                    f"{found['seconds'] / predicted:.2f}",
                ]
            )
    head = ["case, link", "method", "X modelled", "X sent", "bits a change", "work ms", "predicted ms", "measured ms"]
    return (
        "**The cost model**: S bytes dense, S/X sparse, X = 1/(3ρ) for index and value (6 bytes a change); predicted "
        "is bytes over the link as measured plus the work at both ends as measured, one after the other\n\n"
        + table([*head, "measured ÷ predicted"], rows)
    )


# -- what was asked ------------------------------------------------------------------------------------------------

Check = tuple[bool, str, dict[str, float]]


def checks(points: list[Point]) -> Iterator[Check]:
    """Yield (whether it was reached, a sentence, figures) for every goal."""
    known = [point for point in points if "ours" in point["ways"]]
    yield from messages_check(known)
    yield from bytes_check(known)
    yield from slow_link_check(known)
    yield from worst_check(known, "with everything")
    yield from worst_check(known, "with everything, by the least of each instead of the median", "least")
    yield from worst_check(known, "without digest and undo", way="without digest and undo")
    yield from choice_check(known)


def messages_check(points: list[Point]) -> Iterator[Check]:
    """By link and fixed method; `ours`, which chooses, is left out, since its choice may depend on the tensors."""
    counts: dict[str, dict[int, float]] = {}
    for point in points:
        for way, found in point["ways"].items():
            if point["sweep"] == "tensors" and way.startswith("ours, "):
                counts.setdefault(f"{point['link']}, {way}", {})[point["tensors"]] = found["messages"]
    compared = {name: by_count for name, by_count in counts.items() if len(by_count) > 1}
    if compared:
        seen = "; ".join(f"{name}: {span(f'{n:g}' for n in by_count.values())}" for name, by_count in compared.items())
        most = max(max(by_count.values()) - min(by_count.values()) for by_count in compared.values())
        said = f"messages of ours do not depend on the number of tensors, except for one that timing may save ({seen})"
        yield most <= 1, said, {"messages_differ_by": most}


def bytes_check(points: list[Point]) -> Iterator[Check]:
    for case in cases_of([p for p in points if 0.004 < p["density"] < 0.02 and "ours, coded" in p["ways"]]):
        point = case[0]
        if point["sweep"] == "tensors":
            continue
        ways = point["ways"]
        ratio = ways["index+value bucketed"]["sent_bytes"] / ways["ours, coded"]["sent_bytes"]
        name = f"{point['sweep']}, {point['case'].split(',')[0]}, {point['density']:.2%}"
        yield (
            ratio >= 8,
            f"bytes of index+value ÷ ours, coded: {ratio:.2f} ({name}; asked ≥ 8)",
            {f"bytes {name}": ratio},
        )


def slow_link_check(points: list[Point]) -> Iterator[Check]:
    for point in points:
        if point["link"] != "0.1" or "index+value bucketed" not in point["ways"]:
            continue
        ratio = point["ways"]["index+value bucketed"]["seconds"] / point["ways"]["ours"]["seconds"]
        name = f"{point['sweep']}, {point['case']}"
        said = f"index+value bucketed ÷ ours at 0.1 Gbit/s: {ratio:.2f} ({name}; asked ≥ 5)"
        yield ratio >= 5, said, {f"0.1 {name}": ratio}


def worst_check(points: list[Point], label: str, by: str = "seconds", way: str = "ours") -> Iterator[Check]:
    """How far ours is from the fastest of the others, at worst and at the median."""
    ratios = []
    for point in points:
        if (ours := point["ways"].get(way)) is None:
            continue
        ratios.append((ours[by] / min(ours[by], fastest(point, OTHERS, by)), point))
    if ratios:
        ratio, point = max(ratios, key=lambda one: one[0])
        over = sum(one > 1.25 for one, _ in ratios)
        middle = statistics.median(one for one, _ in ratios)
        said = (
            f"ours ÷ fastest, {label}: at worst {ratio:.2f} ({point['sweep']}, {point['case']}, {point['link']}), "
            f"median {middle:.2f}, above 1.25 at {over} of {len(ratios)} points (asked ≤ 1.25)"
        )
        yield ratio <= 1.25, said, {f"worst {label}": ratio}


def choice_check(points: list[Point]) -> Iterator[Check]:
    """Whether the automatic choice is as fast as the best of our fixed methods."""
    ratios = []
    for point in points:
        held = [way for way in point["ways"] if way.startswith("ours, ")]
        if held:
            best = min(held, key=lambda way: point["ways"][way]["seconds"])
            ratios.append((point["ways"]["ours"]["seconds"] / point["ways"][best]["seconds"], point, best))
    if ratios:
        ratio, point, best = max(ratios, key=lambda one: one[0])
        said = (
            f"ours ÷ the best of ours with a fixed method: at worst {ratio:.2f} ({point['sweep']}, {point['case']}, "
            f"{point['link']}: chose {point['ways']['ours']['method']}, best {best.removeprefix('ours, ')})"
        )
        yield ratio <= 1.25, said, {"worst choice": ratio}
