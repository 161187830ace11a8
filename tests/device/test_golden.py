"""The golden runs on a device: read to the same weights, and written again to the same bytes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from pulsesync.core.types import Bits
from pulsesync.device.state import DeviceBackend
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.state.host import HostBackend
from pulsesync.state.slices import Slice, Slices, find_places, windows
from pulsesync.state.weights import Recount, WeightState
from tests.device.pairs import Pair, to_bits, to_flats
from tests.helpers import apply, copied, load, same

FOLDER = Path(__file__).parents[1] / "golden" / "v1"
RUNS = sorted(run for run in FOLDER.iterdir() if run.is_dir())
by_name = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)


def records(run: Path, place: str = "manifests") -> list[Manifest]:
    paths = sorted(path for path in (run / place).rglob("*") if path.is_file())
    return [manifests.parse(path.read_bytes()) for path in paths]


def layout_of(run: Path) -> Layout:
    return layouts.parse((run / "layouts" / records(run)[0].layout).read_bytes())


def bodies(run: Path, record: Manifest) -> tuple[Manifest, list[bytes]]:
    return record, [part_of(run, ref) for ref in record.parts]


def part_of(run: Path, ref: PartRef) -> bytes:
    """The file of a part, or what it would be."""
    return (run / "parts" / ref.id).read_bytes() if ref.data is None else ref.data


def versions(run: Path) -> Iterator[tuple[Manifest, Manifest, list[bytes]]]:
    """Every version with what brings a state there: an anchor for roots, the patch for the others."""
    anchors = {anchor.version: anchor for anchor in records(run, "anchors")}
    for version in records(run):
        yield version, *bodies(run, anchors[version.version] if version.base is None else version)


def follow(state: WeightState, run: Path, most: int = 1 << 60) -> Iterator[Manifest]:
    for version, record, parts in versions(run):
        if version.version > most:
            return
        (load if version.base is None else apply)(state, (record, parts))
        yield version


@pytest.mark.gpu
@by_name
def test_every_version_reads_to_the_expected_weights(run: Path, device: str) -> None:
    layout = layout_of(run)
    empty = WeightState(HostBackend.empty(layout))
    state = WeightState(DeviceBackend(layout, to_flats(empty.flats, device)))
    for version in follow(state, run):
        assert state.digest == version.digest
    assert Recount(state).digest() == version.digest
    with np.load(run / "expected.npz") as expected:
        assert same(to_bits(state.flats), dict(expected))


@pytest.mark.gpu
@by_name
def test_every_patch_is_written_again_byte_for_byte(run: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one part: a publisher on a GPU writes no others. Which codec was asked for, a record does not say."""
    if run.name == "sections":
        monkeypatch.setattr(patch, "SECTION_BYTES", 1 << 10)  # as when this run was written
    host = WeightState(HostBackend.empty(layout_of(run)))
    last, before, history, tried = None, {}, host.history, 0
    for version in follow(host, run):
        if last is not None and version.base is not None and len(version.parts) == 1:
            data = part_of(run, version.parts[0])
            written = (_written(host, before, history, last, codec, device) for codec in CODECS)
            assert any(again == data for again in written)
            tried += 1
        last, before, history = version, copied(host.flats), host.history
    assert tried


CODECS: tuple[patch.CodecName, ...] = get_args(patch.CodecName)


def _written(
    then: WeightState, before: Mapping[str, Bits], history: History, last: Manifest, codec: patch.CodecName, device: str
) -> bytes:
    pair = Pair(then.layout, before, device, codec)
    pair.state.history, pair.last = pair.backend.load_history(history), last
    return bytes(pair.encode(then.flats)[0].data)


SOME = [
    ("dtypes", {"*": None, "F8_E5M2.matrix": Slice(), "I64.matrix": Slice()}, 1),
    ("gap-and-dense", {}, 2),
    ("two-parts", {"*": None, "a": Slice(rows=(0, 24), columns=(24, 25)), "c": Slice()}, 1),
]


@pytest.mark.parametrize(("name", "slices", "most"), SOME, ids=[name for name, *_ in SOME])
def test_some_tensors_of_a_run_read_as_on_the_host(name: str, slices: Slices, most: int, device: str) -> None:
    """So few that the interpreter reads them too."""
    layout, run = layout_of(FOLDER / name), FOLDER / name
    places = find_places(layout, slices)
    there = WeightState(HostBackend(layout, _zeros(layout, slices), places=places))
    here = WeightState(DeviceBackend(layout, to_flats(there.flats, device), places=places))
    for ours, theirs in zip(follow(here, run, most), follow(there, run, most), strict=True):
        assert ours == theirs
        assert same(to_bits(here.flats), there.flats)
        assert here.sums == there.sums
        assert here.history.to_bytes() == there.history.to_bytes()
    assert ours.version == most


def _zeros(layout: Layout, slices: Slices) -> dict[str, Bits]:
    held = windows(layout.tensors, slices)
    return {name: np.zeros(window.local.size, window.local.kind.bits) for name, window in held.items()}
