"""docs/format.md is enough to read a run: the reader at its end, made from the page alone, reads the golden files."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature

from pulsesync.core.types import DTYPES, Dtype
from tests.golden import make_golden

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
RUNS = sorted(make_golden.FOLDER.iterdir())
SMALL, SIGNED = make_golden.FOLDER / "two-parts", make_golden.FOLDER / "signed-squash"
BY_KEY = [SIGNED, make_golden.FOLDER / "extensions", make_golden.FOLDER / "rewinds"]
TRUST = [make_golden.KEY.public]
REFUSALS = (ValueError, KeyError, OSError, InvalidSignature)

ReadRun = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def read_run() -> ReadRun:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    names: dict[str, ReadRun] = {}
    exec(compile(code, "docs/format.md", "exec"), names)
    return names["read_run"]


def assert_expected(run: Path, state: dict[str, np.ndarray]) -> None:
    with np.load(run / "expected.npz") as expected:
        assert set(state) == set(expected)
        for name, bits in expected.items():
            assert state[name].dtype == bits.dtype
            np.testing.assert_array_equal(state[name], bits, err_msg=name)


def marks(run: Path) -> Any:
    """The document's reader, in plain Python, takes 2 s for this run, of every value that BF16 has."""
    return pytest.mark.slow if run.name == "bf16-history" else ()


@pytest.mark.parametrize("run", [pytest.param(run, marks=marks(run), id=run.name) for run in RUNS])
def test_the_documents_reader_reads_the_run(run: Path, read_run: ReadRun) -> None:
    assert_expected(run, read_run(run, TRUST if run in BY_KEY else None, squashes=False))


@pytest.mark.parametrize(
    ("run", "epoch"),
    [
        pytest.param(run, int(path.name), marks=marks(run))
        for run in RUNS
        for path in sorted((run / "anchors").iterdir())
        if int(path.name)
    ],
    ids=lambda value: value.name if isinstance(value, Path) else str(value),
)
def test_the_documents_reader_begins_with_any_anchor(run: Path, epoch: int, read_run: ReadRun) -> None:
    assert_expected(run, read_run(run, TRUST if run in BY_KEY else None, epoch=epoch))


def test_the_documents_reader_takes_a_squash_in_place_of_its_patches(tmp_path: Path, read_run: ReadRun) -> None:
    run = tmp_path / "run"
    shutil.copytree(SIGNED, run)
    for version in range(1, 32):
        (run / "manifests" / f"{version:016}").unlink()
    assert_expected(SIGNED, read_run(run, TRUST))
    with pytest.raises(REFUSALS):
        read_run(run, TRUST, squashes=False)


@pytest.mark.parametrize("trust", [[], ["00" * 32], [make_golden.HELPER.public]])
def test_the_documents_reader_trusts_nobody_else(trust: list[str], read_run: ReadRun) -> None:
    with pytest.raises(REFUSALS):
        read_run(SIGNED, trust)


def test_the_documents_reader_refuses_an_unsigned_record_under_trust(tmp_path: Path, read_run: ReadRun) -> None:
    run = tmp_path / "run"
    shutil.copytree(SIGNED, run)
    victim = max((run / "manifests").iterdir())
    victim.write_bytes(victim.read_bytes()[:-96])
    assert_expected(SIGNED, read_run(run))
    with pytest.raises(REFUSALS):
        read_run(run, TRUST)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("kind", ["layouts", "manifests", "parts", "anchors"])
def test_the_documents_reader_refuses_a_run_with_one_flipped_bit(
    kind: str, place: float, tmp_path: Path, read_run: ReadRun
) -> None:
    assert_refused_with_a_flipped_bit(SMALL, kind, place, tmp_path, read_run)


@pytest.mark.parametrize("place", [0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["manifests", "anchors", "squashes/00", "files"])
def test_the_documents_reader_refuses_a_signed_run_with_one_flipped_bit(
    kind: str, place: float, tmp_path: Path, read_run: ReadRun
) -> None:
    epoch = 1 if kind == "anchors" else 0
    assert_refused_with_a_flipped_bit(SIGNED, kind, place, tmp_path, lambda run: read_run(run, TRUST, epoch))


def assert_refused_with_a_flipped_bit(
    good: Path, kind: str, place: float, folder: Path, read: Callable[[Path], object]
) -> None:
    run = folder / "run"
    shutil.copytree(good, run)
    victim = max(path for path in (run / kind).iterdir() if path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[int(place * len(data))] ^= 1
    victim.write_bytes(data)
    with pytest.raises(REFUSALS):
        read(run)


def test_the_documents_table_of_dtypes_is_the_librarys() -> None:
    (rows,) = re.findall(r"^\| code \| dtype .*\n\|[-|]+\|\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    table = {}
    for row in rows.splitlines():
        _, *left, _, code, name, size, exponent, _ = (cell.strip() for cell in row.split("|"))
        for codes, names, size_bytes, shift in (left, (code, name, size, exponent)):
            for one, dtype in zip(filter(None, codes.split(", ")), filter(None, names.split(", ")), strict=True):
                table[dtype] = Dtype(int(one), int(size_bytes), None if shift == "–" else int(shift))
    assert table == DTYPES
