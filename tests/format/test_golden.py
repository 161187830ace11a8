"""The golden runs: every reader reads them to the same weights, and this writer writes them again byte for byte."""

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard

from pulsesync import Subscriber
from pulsesync.core.types import DTYPES, Codec
from pulsesync.errors import SignatureError
from pulsesync.format import container, index
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import pointer as pointers
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef, RecordKind
from pulsesync.format.pointer import Pointer
from pulsesync.run import keys, planner
from pulsesync.run.planner import Position
from pulsesync.state.host import HostBackend
from pulsesync.state.views import new_tensors
from pulsesync.state.weights import Recount, WeightState
from pulsesync.store import LocalStore
from tests.backends import use_kernels
from tests.distributions import ROOT, pins
from tests.golden import make_golden
from tests.helpers import apply, load

RUNS = sorted(make_golden.FOLDER.iterdir())
SIGNED = make_golden.FOLDER / "signed-squash"
BY_KEY = [SIGNED, make_golden.FOLDER / "extensions", make_golden.FOLDER / "rewinds"]
TRUST = {make_golden.KEY.public}


def by_name(runs: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", runs, ids=lambda run: run.name)


def records(run: Path, place: str) -> list[Manifest]:
    """Of a signed run, only what its key vouches for."""
    paths = sorted(path for path in (run / place).rglob("*") if path.is_file())
    return [manifests.parse(path.read_bytes(), TRUST if run in BY_KEY else None) for path in paths]


def everything(run: Path) -> list[Manifest]:
    return [record for place in ("manifests", "anchors", "squashes") for record in records(run, place)]


def moves(run: Path) -> list[Pointer]:
    """Those of all pointers, in order."""
    paths = sorted(path for path in (run / "pointers").rglob("*") if path.name.isdigit())
    return [pointers.parse(path.read_bytes(), TRUST if run in BY_KEY else None) for path in paths]


def layout_of(run: Path) -> Layout:
    return layouts.parse((run / "layouts" / records(run, "manifests")[0].layout).read_bytes())


def bodies(run: Path, record: Manifest) -> tuple[Manifest, list[bytes]]:
    return record, [part_of(run, ref) for ref in record.parts]


def part_of(run: Path, ref: PartRef) -> bytes:
    """The file of a part, or what it would be."""
    return (run / "parts" / ref.id).read_bytes() if ref.data is None else ref.data


def replay(run: Path, last: int | None = None) -> WeightState:
    """Every version in turn, or up to one: roots by their anchors, the others by their patches."""
    state = WeightState(HostBackend.empty(layout_of(run)))
    anchors = {anchor.version: anchor for anchor in records(run, "anchors")}
    held = None
    for version in records(run, "manifests")[: None if last is None else last + 1]:
        if version.base is None:
            load(state, bodies(run, anchors[version.version]))
        else:
            planner.accept(held, version)
            apply(state, bodies(run, version))
        held = Position.of(version)
        assert state.digest == version.digest
    return state


def assert_expected(run: Path, flats: dict[str, np.ndarray]) -> None:
    with np.load(run / "expected.npz") as expected:
        assert set(flats) == set(expected)
        for name, bits in expected.items():
            assert flats[name].dtype == bits.dtype
            np.testing.assert_array_equal(flats[name], bits, err_msg=name)


RELEASED = {  # by release, the golden runs that it added, and the SHA-256 of their lines in v1.sha256
    "0.1.0": (
        "bf16-history bundles corners dtypes extensions gap-and-dense sections signed-squash squash-levels two-parts",
        "26c3733201730ff24f9889e2145e1d4ce878c3704dfdc10ce7620e4c9abab5be",
    ),
    "0.2.0": ("rewinds", "0e2ce5dfa09e4c71c282f5769d4c518f6d3b5fc059cabfbc27e3397660aaa983"),
}


def test_no_golden_file_was_changed_removed_or_added_silently() -> None:
    assert make_golden.HASHES.read_text() == make_golden.list_hashes()


@pytest.mark.parametrize("release", RELEASED)
def test_the_golden_files_of_a_release_are_those_that_it_froze(release: str) -> None:
    """They stay for ever: never change a hash here. A new case is a new run, which the next release adds."""
    names, frozen = RELEASED[release]
    lines = make_golden.HASHES.read_text().splitlines(keepends=True)
    own = "".join(line for line in lines if line.split("/")[1] in names.split())
    assert hashlib.sha256(own.encode()).hexdigest() == frozen


def test_there_is_a_run_for_every_case() -> None:
    assert [run.name for run in RUNS] == sorted(make_golden.CASES)


def test_together_the_runs_use_every_codec_every_dtype_and_every_kind_of_record() -> None:
    codecs, dtypes, kinds, places, counts, whole = set(), set(), set(), set(), set(), set()
    uses: set[tuple[Codec, str]] = set()
    for run in RUNS:
        layout = layout_of(run)
        dtypes |= {spec.dtype for spec in layout.tensors}
        kinds |= {(record.kind, record.base is None) for record in everything(run)}
        for ref in (ref for record in everything(run) for ref in record.parts):
            places.add("parts" if ref.data is None else "record")
            _, sections = container.open_part(part_of(run, ref), ref.id)
            _, entries = index.parse(sections[0], len(layout.tiles), [len(section) for section in sections])
            codecs |= {entry.codec for entry in entries}
            uses |= {(entry.codec, layout.tiles[entry.tile].tensor.dtype) for entry in entries}
            counts.add(min(len(sections), 3))
        for anchor in records(run, "anchors"):
            for _, sections in (container.open_part(part_of(run, ref)) for ref in anchor.parts):
                _, entries = index.parse(sections[0], len(layout.tiles), [len(section) for section in sections])
                whole.add(frozenset(entry.codec for entry in entries))
    assert codecs == set(Codec)
    floats = [name for name, kind in DTYPES.items() if kind.exponent_shift is not None]
    assert {(codec, dtype) for codec in (Codec.GAP, Codec.DENSE, Codec.XOR) for dtype in DTYPES} <= uses
    assert {(codec, dtype) for codec in (Codec.STEP, Codec.CONTEXT, Codec.HISTORY) for dtype in floats} <= uses
    assert counts == {2, 3}  # two sections, and more
    assert frozenset({Codec.RAW}) in whole
    assert any(Codec.DENSE in some for some in whole)
    assert places == {"parts", "record"}
    assert dtypes == set(DTYPES)
    assert kinds == {
        (RecordKind.VERSION, True),
        (RecordKind.VERSION, False),
        (RecordKind.ANCHOR, True),
        (RecordKind.SQUASH, False),
    }


LARGE = ("bf16-history", "corners")  # runs for which the reference kernels, in Python, take 2 s and 1 s


@pytest.mark.parametrize(
    ("run", "kernel"),
    [
        pytest.param(run, kernel, marks=pytest.mark.slow if kernel == "reference" and run.name in LARGE else ())
        for run in RUNS
        for kernel in ("cpu", "reference")
    ],
    ids=lambda it: it if isinstance(it, str) else it.name,
)
def test_every_version_reads_to_the_expected_weights(run: Path, kernel: str) -> None:
    with use_kernels(kernel):
        state = replay(run)
        promised = state.digest
        assert Recount(state).digest() == promised
    assert_expected(run, state.flats)


@by_name(RUNS)
def test_a_squash_is_its_patches_in_one(run: Path) -> None:
    versions = records(run, "manifests")
    for squash in records(run, "squashes"):
        assert squash.base is not None
        state = replay(run, squash.base.version)
        planner.accept(Position.of(versions[squash.base.version]), squash)
        apply(state, bodies(run, squash))
        assert Recount(state).digest() == squash.digest == versions[squash.version].digest


def test_squashes_lead_over_one_epoch_and_over_two() -> None:
    squashes = [squash for run in RUNS for squash in records(run, "squashes")]
    spans = [(squash.base.version, squash.version) for squash in squashes if squash.base]
    assert sorted(set(spans)) == [(0, 32), (0, 64), (32, 64)]


@by_name(RUNS)
def test_every_object_is_where_its_name_says(run: Path) -> None:
    named = {keys.part_key(ref.id) for record in everything(run) for ref in record.parts if ref.data is None}
    named |= {keys.file_key(file.id) for record in everything(run) for file in record.files}
    named |= {keys.manifest_key(record.version) for record in records(run, "manifests")}
    named |= {keys.anchor_key(record.starts) for record in records(run, "anchors")}
    for move in moves(run):
        named |= {keys.pointer_key(move.name, move.number), keys.pointer_hint(move.name)}
    named |= {keys.layout_key(layout_of(run).id), keys.HEAD, "expected.npz"}
    starts = {path.name: int(path.read_text()) for path in (run / "starts").iterdir()}
    named |= {keys.start_key(digest) for digest in starts}
    for path in (path for path in (run / "squashes").rglob("*") if path.is_file()):
        level, number = int(path.parent.name), int(path.name)
        record = manifests.parse(path.read_bytes())
        assert record.starts == number + 1 << level
        named.add(keys.squash_key(level, number))
    assert {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} == named
    versions = records(run, "manifests")
    assert all(versions[version].digest == digest for digest, version in starts.items())
    assert int((run / "head").read_text()) == versions[-1].version
    for file in (file for record in everything(run) for file in record.files):
        data = (run / keys.file_key(file.id)).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.id, file.size)


@pytest.mark.parametrize("version", [None, 2])
@by_name(RUNS)
def test_a_subscriber_reads_the_run(run: Path, version: int | None) -> None:
    """From nothing to a version, and from there to the last one."""
    tensors = new_tensors(layout_of(run).tensors)
    follower = Subscriber(LocalStore(run), trust=TRUST if run in BY_KEY else None)
    if version is not None:
        assert follower.sync(tensors, version=version).version == version
    assert follower.sync(tensors).version == records(run, "manifests")[-1].version
    assert_expected(run, {name: tensor.reshape(-1).view(f"u{tensor.itemsize}") for name, tensor in tensors.items()})


def test_the_signed_run_is_for_its_own_key_alone() -> None:
    for path in (SIGNED / "manifests").iterdir():
        with pytest.raises(SignatureError):
            manifests.parse(path.read_bytes(), {make_golden.HELPER.public})
    (squash,) = (path for path in (SIGNED / "squashes").rglob("*") if path.is_file())
    assert manifests.parse(squash.read_bytes(), TRUST).kind == RecordKind.SQUASH
    assert bytes.fromhex(make_golden.HELPER.public) in squash.read_bytes()


def test_the_pointers_of_the_signed_run_were_moved_on_and_back_by_its_key() -> None:
    assert [(move.name, move.number, move.version) for move in moves(SIGNED)] == [
        ("canary-eu.1_b", 0, 35),
        ("stable", 0, 32),
        ("stable", 1, 34),
        ("stable", 2, 33),
    ]
    versions = records(SIGNED, "manifests")
    for move in moves(SIGNED):
        assert (move.run, move.digest) == (versions[move.version].run, versions[move.version].digest)
        assert move.signed_by == make_golden.KEY.public


def test_the_run_with_rewinds_says_where_the_trainer_went_back() -> None:
    run = make_golden.FOLDER / "rewinds"
    versions = records(run, "manifests")
    assert [one.rewound_at for one in versions] == [None] * 20 + [20] * 16 + [36] * 4
    assert [later.version for one, later in pairwise(versions) if later.step < one.step] == [20, 36]
    assert not [one for one in everything(run) if one.kind != RecordKind.VERSION and one.rewound_at is not None]


@pytest.mark.parametrize(("name", "version"), [("stable", 33), ("canary-eu.1_b", 35)])
def test_a_subscriber_follows_a_pointer_of_the_run(name: str, version: int) -> None:
    tensors = new_tensors(layout_of(SIGNED).tensors)
    report = Subscriber(LocalStore(SIGNED), trust=TRUST, follow=name).sync(tensors)
    assert (report.version, report.digest) == (version, records(SIGNED, "manifests")[version].digest)


@by_name(RUNS)
def test_writing_a_run_again_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    """zstd frames may differ with the library's version: with the pinned one they are equal as well."""
    again = tmp_path / run.name
    make_golden.CASES[run.name](again)
    with np.load(again / "expected.npz") as expected:
        assert_expected(run, dict(expected))
    if zstandard.__version__ != pins(ROOT / "constraints" / "dev.txt")["zstandard"]:
        pytest.skip(f"the weights are equal; the frames of zstandard {zstandard.__version__} need not be")
    names = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    assert {path.relative_to(again) for path in again.rglob("*") if path.is_file()} == names
    names -= {Path("expected.npz")}  # its own bytes depend on zlib, which nothing pins
    assert [name for name in names if (again / name).read_bytes() != (run / name).read_bytes()] == []
