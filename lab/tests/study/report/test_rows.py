"""Three tidy tables, and that they come back from files as they were."""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from lab.tests.recordings import header, made
from pulsesync.errors import PulseError
from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report import rows


def test_steps_have_a_row_each_with_the_same_columns() -> None:
    found = list(rows.step_rows(made()))
    assert [row["sparsity"] for row in found] == pytest.approx([0.99, 0.96, 0.98])
    assert all(row.keys() == found[0].keys() for row in found)
    assert (found[0]["sparsity_k2"], found[1]["sparsity_k2"]) == (None, pytest.approx(0.98))
    assert (found[0]["history_bytes_real"], found[0]["gap_bytes_real"]) == (80, None)
    assert (found[0]["by_one_unit"], found[0]["by_two_units"], found[0]["by_more"]) == (38, 0, 2)
    assert found[2]["fact_reward"] == 0.2


def test_tensors_have_a_row_for_each_window() -> None:
    found = list(rows.tensor_rows(made()))
    assert len(found) == 4 + 8 + 8
    last = found[-1]
    assert (last["layer"], last["kind"], last["expert"], last["k"]) == (1, "self_attn.q_proj", None, 2)
    assert (last["weights"], last["changed"], last["sparsity"]) == (100, 2, 0.98)
    assert [row["changed"] for row in found if row["step"] == 1 and row["k"] == 1] == [40, 40, 40, 40]


def test_exponents_have_a_row_for_each_class() -> None:
    found = list(rows.exponent_rows(made()))
    assert found[0] == {
        "step": 0,
        "exponent": 110,
        "magnitude": 2.0**-17,
        "weights": 400,
        "changed": 20,
        "density": 0.05,
    }


def test_csv_files_can_be_read_back(tmp_path: Path) -> None:
    paths = rows.write_csv(made(), tmp_path)
    assert [path.name for path in paths] == ["steps.csv", "tensors.csv", "exponents.csv"]
    with paths[0].open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["sparsity"]) for row in read] == pytest.approx([0.99, 0.96, 0.98])
    assert read[0]["sparsity_k2"] == ""


def test_parquet_files_can_be_read_back(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = rows.write_parquet(made(), tmp_path)
    assert parquet.read_table(paths[1]).to_pylist() == list(rows.tensor_rows(made()))
    assert parquet.read_table(paths[0]).column("sparsity").to_pylist() == pytest.approx([0.99, 0.96, 0.98])


def test_parquet_takes_facts_of_any_kind_in_more_than_one_batch(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    odd = [replace(one, facts={"note": value}) for one, value in zip(made().steps, (1, "x", [2]), strict=True)]
    with mock.patch.object(rows, "BATCH", 2):
        paths = rows.write_parquet(Recording(header(), tuple(odd)), tmp_path)
    assert parquet.read_table(paths[0]).column("fact_note").to_pylist() == ["1", "x", "[2]"]


def test_a_recording_without_steps_has_empty_tables(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    empty = Recording(header(), ())
    assert [path.read_text() for path in rows.write_csv(empty, tmp_path)] == ["", "", ""]
    assert all(path.stat().st_size for path in rows.write_parquet(empty, tmp_path))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules, {"pyarrow": None}), pytest.raises(PulseError, match=r"pulsesync-lab\[study\]"):
        rows.write_parquet(made(), tmp_path)


def test_how_weights_changed_is_not_known_from_their_number() -> None:
    counted = [replace(made().steps[0], units={}, again=0), replace(made().steps[0], units={}, changed=(0, 0, 0, 0))]
    known, still = rows.step_rows(Recording(header(), tuple(counted)))
    names = ("again", "same_way", "up", "by_one_unit", "by_two_units", "by_more")
    assert {known[name] for name in names} == {None}
    assert still["by_one_unit"] == 0


def test_k_is_in_steps() -> None:
    wide = Recording(header(facts={"every": 5}), made().steps)
    assert {row["k"] for row in rows.tensor_rows(wide)} == {5, 10}
    assert "sparsity_k10" in next(rows.step_rows(wide))
