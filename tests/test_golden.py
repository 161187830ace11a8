"""The golden runs: every reader reads them to the same weights, and this writer writes them again byte for byte."""

from pathlib import Path

import numpy as np
import pytest

from pulsesync import kernels
from pulsesync.format import container, index, manifest
from pulsesync.format import layout as layouts
from pulsesync.model import DTYPES, Codec
from pulsesync.state import State
from tests.golden import make_golden

RUNS = sorted(make_golden.FOLDER.iterdir())
FILES = ("layouts", "manifests", "parts")


def by_name(runs: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", runs, ids=lambda run: run.name)


def manifests(run: Path) -> list[manifest.Manifest]:
    return [manifest.parse(path.read_bytes()) for path in sorted((run / "manifests").iterdir())]


def layout_of(run: Path) -> layouts.Layout:
    return layouts.parse((run / "layouts" / manifests(run)[0].layout).read_bytes())


def replay(run: Path) -> State:
    layout = layout_of(run)
    state = State(layout, {spec.name: np.zeros(spec.size, spec.kind.bits) for spec in layout.tensors}, {})
    for version in manifests(run):
        parts = [(run / "parts" / ref.id).read_bytes() for ref in version.parts]
        state.commit(state.prepare(version, parts))
    return state


def assert_expected(run: Path, flats: dict[str, np.ndarray]) -> None:
    with np.load(run / "expected.npz") as expected:
        assert set(flats) == set(expected)
        for name, bits in expected.items():
            assert flats[name].dtype == bits.dtype
            np.testing.assert_array_equal(flats[name], bits, err_msg=name)


def test_there_is_a_run_for_every_case() -> None:
    assert [run.name for run in RUNS] == sorted(make_golden.CASES)


def test_together_the_runs_use_every_codec_and_every_dtype() -> None:
    codecs, dtypes = set(), set()
    for run in RUNS:
        layout = layout_of(run)
        dtypes |= {spec.dtype for spec in layout.tensors}
        for ref in (ref for version in manifests(run) for ref in version.parts):
            _, sections = container.open_part((run / "parts" / ref.id).read_bytes(), ref.id)
            _, entries = index.parse(sections[0], len(layout.tiles), [len(section) for section in sections])
            codecs |= {entry.codec for entry in entries}
    assert codecs == set(Codec)
    assert dtypes == set(DTYPES)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@by_name(RUNS)
def test_every_version_reads_to_the_expected_weights(run: Path, kernel: str) -> None:
    with kernels.forced(kernel):
        state = replay(run)
        promised = state.digest
        assert state.recount() == promised
    assert_expected(run, state.flats)


@by_name(RUNS)
def test_writing_a_run_again_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    """zstd frames may differ with the library's version: constraints.txt pins it, so here they are equal as well."""
    again = tmp_path / run.name
    make_golden.CASES[run.name](again)
    for kind in FILES:
        names = {path.name for path in (run / kind).iterdir()}
        assert {path.name for path in (again / kind).iterdir()} == names
        assert [name for name in names if (again / kind / name).read_bytes() != (run / kind / name).read_bytes()] == []
    with np.load(again / "expected.npz") as expected:  # its own bytes depend on zlib, which nothing pins
        assert_expected(run, dict(expected))
