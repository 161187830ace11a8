"""docs/FORMAT.md is enough to read a run: the reader at its end, made from the page alone, reads the golden files."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pulsesync.model import DTYPES, Dtype
from tests.golden import make_golden

DOCUMENT = (Path(__file__).parents[1] / "docs" / "FORMAT.md").read_text(encoding="utf-8")
RUNS = sorted(make_golden.FOLDER.iterdir())
SMALL = make_golden.FOLDER / "two-parts"


@pytest.fixture(scope="module")
def read_run() -> Callable[[Path], dict[str, np.ndarray]]:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    names: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {}
    exec(compile(code, "docs/FORMAT.md", "exec"), names)
    return names["read_run"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_documents_reader_reads_the_run(run: Path, read_run: Callable[[Path], dict[str, np.ndarray]]) -> None:
    state = read_run(run)
    with np.load(run / "expected.npz") as expected:
        assert set(state) == set(expected)
        for name, bits in expected.items():
            assert state[name].dtype == bits.dtype
            np.testing.assert_array_equal(state[name], bits, err_msg=name)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("kind", ["layouts", "manifests", "parts"])
def test_the_documents_reader_refuses_a_run_with_one_flipped_bit(
    kind: str, place: float, tmp_path: Path, read_run: Callable[[Path], dict[str, np.ndarray]]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(SMALL, run)
    victim = max((run / kind).iterdir())
    data = bytearray(victim.read_bytes())
    data[int(place * len(data))] ^= 1
    victim.write_bytes(data)
    with pytest.raises((ValueError, KeyError, OSError)):
        read_run(run)


def test_the_documents_table_of_dtypes_is_the_librarys() -> None:
    (rows,) = re.findall(r"^\| code \| dtype .*\n\|[-|]+\|\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    table = {}
    for row in rows.splitlines():
        _, *left, _, code, name, size, exponent, _ = (cell.strip() for cell in row.split("|"))
        for codes, names, size_bytes, shift in (left, (code, name, size, exponent)):
            for one, dtype in zip(filter(None, codes.split(", ")), filter(None, names.split(", ")), strict=True):
                table[dtype] = Dtype(int(one), int(size_bytes), None if shift == "–" else int(shift))
    assert table == DTYPES
