"""A recording as three tidy tables: steps, tensors (step × tensor × k), exponents (step × class); as CSV or Parquet."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pulsesync.errors import PulseError
from pulsesync_lab.study.recording import Counts, Recording, Step
from pulsesync_lab.study.report.exponents import FLOATS, magnitude
from pulsesync_lab.study.report.findings import OUTSIDE, looks_apart, place

Row = dict[str, Any]

BATCH = 1 << 16  # rows that are in memory at a time


def step_rows(recording: Recording) -> Iterator[Row]:
    """One row per step. Missing values are None; every row has the same columns."""
    header = recording.header
    codecs = list(dict.fromkeys(codec for step in recording.steps for codec in step.sizes))
    facts = _fact_columns(recording.steps)
    every = looks_apart(recording)
    for step in recording.steps:
        row: Row = {
            "step": step.step,
            "lr": step.lr,
            "weights": recording.size,
            "changed": step.all_changed,
            "sparsity": 1 - step.all_changed / max(recording.size, 1),
            **_ways(step),
            "gradients": _share(step.gradients, header.sampled),
            "hot": step.hot,
            "seconds": step.seconds,
        }
        for k in header.windows:
            row[f"sparsity_k{k * every}"] = _unchanged(step.windows.get(k), header.sampled)
        for dtype in header.contrast:
            row[f"sparsity_{dtype}"] = _unchanged(step.contrast.get(dtype), header.sampled)
        for codec in codecs:
            size = step.sizes.get(codec)
            row[f"{codec}_bytes_predicted"] = size.predicted if size else None
            row[f"{codec}_bytes_real"] = size.real if size else None
        yield row | {f"fact_{name}": None if name not in step.facts else as_(step.facts[name]) for name, as_ in facts}


def tensor_rows(recording: Recording) -> Iterator[Row]:
    """One row for each tensor and each window of k steps, by step: the first of all weights, others of the sample."""
    places = [place(tensor.name) for tensor in recording.header.tensors]
    every = looks_apart(recording)
    for step in recording.steps:
        for k, counts, sampled in _windows(step):
            for tensor, where, changed in zip(recording.header.tensors, places, counts, strict=True):
                weights = tensor.sampled if sampled else tensor.size
                if weights:
                    layer = None if where.layer == OUTSIDE else int(where.layer)
                    yield {
                        "step": step.step,
                        "tensor": tensor.name,
                        "layer": layer,
                        "kind": where.kind,
                        "expert": where.expert,
                        "k": k * every,
                        "weights": weights,
                        "changed": changed,
                        "sparsity": 1 - changed / weights,
                    }


def exponent_rows(recording: Recording) -> Iterator[Row]:
    """One row for each class of weights with the same exponent bits, by step."""
    dtype = recording.header.dtype
    for step in recording.steps:
        for number in sorted({*step.by_class, *step.weights_by_class}):
            weights, changed = step.weights_by_class.get(number, 0), step.by_class.get(number, 0)
            least = magnitude(dtype, number) if dtype in FLOATS else None
            yield {
                "step": step.step,
                "exponent": number,
                "magnitude": least,
                "weights": weights,
                "changed": changed,
                "density": changed / weights if weights else None,
            }


TABLES: Mapping[str, Callable[[Recording], Iterator[Row]]] = {
    "steps": step_rows,
    "tensors": tensor_rows,
    "exponents": exponent_rows,
}


def write_csv(recording: Recording, folder: Path) -> list[Path]:
    """Write steps.csv, tensors.csv and exponents.csv into an existing folder."""
    paths = []
    for name, rows in TABLES.items():
        paths.append(folder / f"{name}.csv")
        with paths[-1].open("w", newline="") as file:
            writer = None
            for row in rows(recording):
                if writer is None:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                writer.writerow(row)
    return paths


def write_parquet(recording: Recording, folder: Path) -> list[Path]:
    """The same as Parquet. Raises: PulseError, if pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise PulseError("Parquet files need pyarrow: pip install 'pulsesync-lab[study]'") from e
    paths = []
    for name, rows in TABLES.items():
        paths.append(folder / f"{name}.parquet")
        going, writer = rows(recording), None
        while batch := list(islice(going, BATCH)):
            table = pyarrow.Table.from_pylist(batch, schema=writer.schema if writer else None)
            writer = writer or parquet.ParquetWriter(paths[-1], table.schema)
            writer.write_table(table)
        if writer is None:  # a table without rows has no columns either
            parquet.write_table(pyarrow.table({}), paths[-1])
        else:
            writer.close()
    return paths


def _windows(step: Step) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    yield 1, step.changed, False
    yield from ((k, counts, True) for k, counts in step.windows.items() if k != 1)


def _fact_columns(steps: Sequence[Step]) -> list[tuple[str, Callable[[Any], Any]]]:
    """The facts of steps, each with its type: a number, if it always is one; else text."""
    kinds: dict[str, bool] = {}
    for name, value in (item for step in steps for item in step.facts.items()):
        kinds[name] = kinds.get(name, True) and isinstance(value, int | float) and not isinstance(value, bool)
    return [(name, float if number else str) for name, number in kinds.items()]


def _ways(step: Step) -> Row:
    """How weights changed: not known if only their number is."""
    units: Counts = step.units
    more = sum(count for unit, count in units.items() if unit > 2)
    row = {
        "again": step.again,
        "same_way": step.same_way,
        "up": step.up,
        "by_one_unit": units.get(1, 0),
        "by_two_units": units.get(2, 0),
        "by_more": more,
    }
    return dict.fromkeys(row) if step.all_changed and not units else dict(row)


def _unchanged(counts: tuple[int, ...] | None, sampled: int) -> float | None:
    return None if counts is None else 1 - (_share(counts, sampled) or 0.0)


def _share(counts: tuple[int, ...], sampled: int) -> float | None:
    return sum(counts) / sampled if counts and sampled else None
