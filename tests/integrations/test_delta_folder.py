"""Delta folders as slime and miles write them become a run, and a run becomes folders that their engines read."""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pulsesync import Publisher, SigningKey, Subscriber
from pulsesync.errors import (
    ChecksumError,
    ConflictError,
    FormatError,
    LimitError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    PulseError,
    SignatureError,
    StateError,
    StoreError,
    UnsupportedError,
)
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.integrations.delta_folder import DeltaExporter, DeltaImporter, DeltaVersion
from pulsesync.integrations.delta_folder import deltas as delta_format
from pulsesync.maintain.prune import prune
from pulsesync.run.reader import RunReader
from pulsesync.store import MemoryStore
from pulsesync.testing import FaultyStore, mutate, random_bits
from tests.commands import pulse
from tests.forked import Forked
from tests.helpers import densities, many, seeds
from tests.integrations.delta_writer import (
    HASHES,
    INDEX,
    EngineCheckpoint,
    flat,
    write_checkpoint,
    write_delta,
    write_skyrl_delta,
)
from tests.tiers import slow

Weights = dict[str, np.ndarray[Any, Any]]
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
ENCODINGS, CHECKSUMS = ("xor", "overwrite"), tuple(HASHES)
# Every checksum with one encoding, and both of them; the other pairs are slow.
PAIRS = [
    pytest.param(encoding, checksum, marks=() if (n + m) % 2 else pytest.mark.slow)
    for n, checksum in enumerate(CHECKSUMS)
    for m, encoding in enumerate(ENCODINGS)
]


def make_states(count: int, seed: int = 0) -> list[Weights]:
    """States of a model with weights of every width and any bits (NaN, −0.0 and subnormals), one without a change."""
    rng = np.random.default_rng(seed)

    def tensor(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
        bits = random_bits(rng, UNSIGNED[np.dtype(dtype).itemsize], shape)
        return bits.view(dtype)

    state: Weights = {
        "model.embed.weight": tensor(ml_dtypes.bfloat16, 40, 16),
        "model.norm.weight": tensor(np.float32, 16),
        "model.fp8.weight": tensor(ml_dtypes.float8_e4m3fn, 8, 8),
        "model.steps": np.array(3, np.int64),
        "model.frozen": tensor(np.float16, 5),
    }
    states = [state]
    for number in range(1, count):
        new = {name: array.copy() for name, array in states[-1].items()}
        if number != 3:
            for name in ("model.embed.weight", "model.norm.weight", "model.fp8.weight"):
                bits = new[name].view(f"<u{new[name].itemsize}")
                bits[...] = mutate(rng, bits, 0.05)
            new["model.norm.weight"][0] = -new["model.norm.weight"][0]
            new["model.steps"] += 1
        states.append(new)
    return states


def write_stream(root: Path, states: list[Weights], **how: Any) -> Path:
    """A base and a delta for each next state, as a trainer of theirs leaves them; returns the base."""
    write_checkpoint(root / "base", states[0])
    for version in range(1, len(states)):
        write_delta(root / "updates", version, states[version - 1], states[version], **how)
    return root / "base"


def publish(location: Path, states: list[Weights], **options: Any) -> str:
    with Publisher(str(location), files={"config.json": b'{"model_type": "test"}'}, **options) as publisher:
        for step, state in enumerate(states):
            publisher.publish(state, step=step)
    return str(location)


def read_run(location: Path | MemoryStore, like: Weights, version: int) -> Weights:
    out = {name: np.zeros_like(array) for name, array in like.items()}
    Subscriber(str(location) if isinstance(location, Path) else location).sync(out, version=version)
    return out


def assert_same(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(flat(actual[name]), flat(array)), name


def assert_run(location: Path, states: list[Weights]) -> None:
    for version, state in enumerate(states):
        assert_same(read_run(location, state, version), state)


def bring(folder: Path, run: Path, base: Path | None = None) -> list[DeltaVersion]:
    with DeltaImporter(folder, str(run), base=base) as importer:
        return importer.update()


def give(run: Path | str, folder: Path, **options: Any) -> list[DeltaVersion]:
    with DeltaExporter(str(run), folder, **options) as exporter:
        return exporter.update()


# Both ways


@pytest.mark.parametrize(("encoding", "checksum"), PAIRS)
def test_folders_of_a_trainer_become_a_run_bit_for_bit(tmp_path: Path, encoding: str, checksum: str) -> None:
    states = make_states(6)
    base = write_stream(tmp_path, states, encoding=encoding, checksum=checksum)
    done = bring(tmp_path / "updates", tmp_path / "run", base)
    assert [one.version for one in done] == [0, 1, 2, 3, 4, 5]
    assert [one.is_delta for one in done] == [False, True, True, True, True, True]
    assert_run(tmp_path / "run", states)


@pytest.mark.parametrize(("encoding", "checksum"), PAIRS)
def test_a_run_becomes_folders_that_an_engine_reads_bit_for_bit(
    tmp_path: Path, encoding: Any, checksum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("state.checkpoint_files", "integrations.delta_folder.deltas"):
        monkeypatch.setattr(f"pulsesync.{module}.SHARD_BYTES", 100)
    states = make_states(6)
    run = publish(tmp_path / "run", states)
    done = give(run, tmp_path / "out", encoding=encoding, checksum=checksum)
    assert [one.is_delta for one in done] == [False, True, True, True, True, True]
    engine = EngineCheckpoint(tmp_path / "out" / "weight_v000000")
    for version in range(1, 6):
        engine.pull(tmp_path / "out", version)
        assert_same(dict(engine.tensors), {name: flat(array) for name, array in states[version].items()})
    assert engine.types["model.embed.weight"] == ("BF16", (40, 16))
    assert len(list((tmp_path / "out" / "weight_v000001").glob("*.safetensors"))) > 1  # of about 100 bytes


def test_what_was_exported_can_be_imported_and_is_the_same_run(tmp_path: Path) -> None:
    states = make_states(5)
    give(publish(tmp_path / "run", states), tmp_path / "out")
    bring(tmp_path / "out", tmp_path / "back")
    assert_run(tmp_path / "back", states)


def test_an_export_writes_the_bytes_that_a_trainer_would_write(tmp_path: Path) -> None:
    states = make_states(3)
    give(publish(tmp_path / "run", states), tmp_path / "out")
    theirs = write_delta(tmp_path / "updates", 2, states[1], states[2], ranks=1)
    ours = tmp_path / "out" / "weight_v000002"
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    mine, other = (json.loads((folder / INDEX).read_text()) for folder in (ours, theirs))
    assert mine["weight_map"] == other["weight_map"]
    assert mine["metadata"].items() >= other["metadata"].items()
    index = [delta_format.read_index(folder) for folder in (ours, theirs)]
    assert index[0] is not None
    assert index[1] is not None
    deltas = [delta_format.read_deltas(one) for one in index if one is not None]
    assert {n: (d.frame.tobytes(), d.checksum) for n, d in deltas[0].items()} == {
        n: (d.frame.tobytes(), d.checksum) for n, d in deltas[1].items()
    }


def test_a_checkpoint_among_the_folders_is_published_as_the_next_version(tmp_path: Path) -> None:
    states = make_states(4)
    updates = tmp_path / "updates"
    write_checkpoint(updates / "weight_v000007", states[0])
    write_delta(updates, 8, states[0], states[1])
    write_checkpoint(updates / "weight_v000009", states[2])
    write_delta(updates, 10, states[2], states[3])
    assert [one.version for one in bring(updates, tmp_path / "run")] == [0, 1, 2, 3]
    assert_run(tmp_path / "run", states)
    assert Subscriber(str(tmp_path / "run")).sync({n: np.zeros_like(a) for n, a in states[0].items()}).step == 10


def test_tied_tensors_are_exported_under_the_name_that_loaders_look_for(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": np.arange(12, dtype=np.float32)}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with Publisher(str(tmp_path / "run")) as publisher:
        publisher.publish(weights)
        weights["lm_head.weight"][3] = 7
        publisher.publish(weights)
    give(tmp_path / "run", tmp_path / "out")
    engine = EngineCheckpoint(tmp_path / "out" / "weight_v000000")
    engine.pull(tmp_path / "out", 1)
    assert_same(dict(engine.tensors), {"model.embed_tokens.weight": flat(weights["lm_head.weight"])})


@pytest.mark.parametrize("checksum", ["xxh3-128", "sha256"])
def test_folders_of_skyrl_become_a_run_bit_for_bit(tmp_path: Path, checksum: str) -> None:
    states = make_states(6)
    write_checkpoint(tmp_path / "base", states[0])
    for version in range(1, 6):
        write_skyrl_delta(tmp_path / "sync", version, states[version - 1], states[version], checksum=checksum)
    (tmp_path / "sync" / "delta-00000006").mkdir()  # being written
    with DeltaImporter(tmp_path / "sync", str(tmp_path / "run"), base=tmp_path / "base") as importer:
        assert [one.version for one in importer.update()] == [0, 1, 2, 3, 4, 5]
        assert importer.incomplete == tmp_path / "sync" / "delta-00000006"
    assert_run(tmp_path / "run", states)
    assert bring(tmp_path / "sync", tmp_path / "run") == []


def edit_version(manifest: Any) -> None:
    manifest["version"] = 7


def edit_base(manifest: Any) -> None:
    manifest["base_version"] = None


def edit_checksum(manifest: Any) -> None:
    manifest["tensors"][0]["checksum"] = "0" * 32


def edit_key(manifest: Any) -> None:
    manifest["tensors"][0]["payload_key"] = "other"


def edit_file(manifest: Any) -> None:
    manifest["tensors"][0]["payload_file"] = "../x.safetensors"


def edit_algorithm(manifest: Any) -> None:
    manifest["tensors"][0]["checksum_algorithm"] = "crc32"


def drop_tensors(manifest: Any) -> None:
    del manifest["tensors"]


def repeat_tensor(manifest: Any) -> None:
    manifest["tensors"] *= 2


def drop_tensor(manifest: Any) -> None:
    del manifest["tensors"][0]


@pytest.mark.parametrize(
    "edit",
    [
        edit_version,
        edit_base,
        edit_checksum,
        edit_key,
        edit_file,
        edit_algorithm,
        drop_tensors,
        repeat_tensor,
        drop_tensor,
    ],
)
def test_a_manifest_of_skyrl_that_says_something_else_is_refused(tmp_path: Path, edit: Callable[[Any], None]) -> None:
    states = make_states(2)
    write_checkpoint(tmp_path / "base", states[0])
    path = write_skyrl_delta(tmp_path / "sync", 1, *states) / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=r"delta-00000001|checksum_format"):
        bring(tmp_path / "sync", tmp_path / "run", tmp_path / "base")
    assert not (tmp_path / "run").exists()


def test_folders_of_two_programs_in_one_place_are_refused(tmp_path: Path) -> None:
    states = make_states(2)
    write_checkpoint(tmp_path / "base", states[0])
    write_delta(tmp_path / "sync", 1, *states)
    write_skyrl_delta(tmp_path / "sync", 1, *states)
    with pytest.raises(FormatError, match="different programs"):
        bring(tmp_path / "sync", tmp_path / "run", tmp_path / "base")


@many
@given(seeds, densities, st.sampled_from(ENCODINGS), st.integers(0, 300))
def test_what_is_encoded_is_decoded_to_the_same_bytes(seed: int, density: float, encoding: Any, size: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, np.uint8, (size,))
    new = mutate(rng, old, density)
    before = old.copy()
    frame = delta_format.encode(encoding, old, new)
    if frame is None:
        assert np.array_equal(old, new)
        return
    assert np.array_equal(delta_format.decode(encoding, np.frombuffer(frame, np.uint8), old), new)
    assert np.array_equal(old, before)


@many
@given(st.binary(max_size=60), st.sampled_from(ENCODINGS), st.booleans())
def test_any_other_bytes_are_decoded_or_refused_by_name(data: bytes, encoding: str, framed: bool) -> None:
    frame = np.frombuffer(zstandard.ZstdCompressor().compress(data) if framed else data, np.uint8)
    with suppress(FormatError):
        assert delta_format.decode(encoding, frame, np.zeros(20, np.uint8)).size == 20


# Parts of a run, and more of it later


def test_an_export_is_continued_when_the_run_has_more_versions(tmp_path: Path) -> None:
    states = make_states(6)
    run = publish(tmp_path / "run", states[:3])
    with DeltaExporter(run, tmp_path / "out") as exporter:
        assert len(exporter.update()) == 3
        publish(tmp_path / "run", states[3:5])
        assert [one.version for one in exporter.update()] == [3, 4]
    publish(tmp_path / "run", states[5:])
    assert [(one.version, one.is_delta) for one in give(run, tmp_path / "out")] == [(5, True)]
    assert give(run, tmp_path / "out") == []
    engine = EngineCheckpoint(tmp_path / "out" / "weight_v000000")
    engine.pull(tmp_path / "out", 5)
    assert_same(dict(engine.tensors), {name: flat(array) for name, array in states[5].items()})


def test_a_part_of_a_run_begins_with_a_checkpoint_that_a_late_engine_starts_from(tmp_path: Path) -> None:
    states = make_states(6)
    run = publish(tmp_path / "run", states)
    with DeltaExporter(run, tmp_path / "out", first=2) as exporter:
        assert [one.version for one in exporter.update(to=4)] == [2, 3, 4]
    assert (tmp_path / "out" / "weight_v000002" / "config.json").read_bytes() == b'{"model_type": "test"}'
    engine = EngineCheckpoint()
    engine.pull(tmp_path / "out", 4)
    assert_same(dict(engine.tensors), {name: flat(array) for name, array in states[4].items()})
    with (
        DeltaExporter(run, tmp_path / "out", first=1) as exporter,
        pytest.raises(ConflictError, match="begins at version 2"),
    ):
        exporter.advance()


def test_an_export_begins_with_the_oldest_version_that_was_not_pruned(tmp_path: Path) -> None:
    states = [{"w": np.full(40, n, np.float32)} for n in range(EPOCH_PATCHES + 4)]
    with Publisher(str(tmp_path / "run"), anchor_every=0) as publisher:
        for state in states:
            publisher.publish(state)
    prune(publisher.store, keep_versions=2, keep_hours=0, grace_hours=0)
    done = give(tmp_path / "run", tmp_path / "out")
    assert [one.version for one in done] == list(range(EPOCH_PATCHES, len(states)))
    with (
        DeltaExporter(str(tmp_path / "run"), tmp_path / "gone", first=1) as exporter,
        pytest.raises(MissingLinkError, match="version 1 is not published"),
    ):
        exporter.advance()


def test_an_export_whose_last_version_was_pruned_says_so_and_what_to_do(tmp_path: Path) -> None:
    with Publisher(str(tmp_path / "run"), anchor_every=0) as publisher:
        publisher.publish({"w": np.full(40, 0, np.float32)})
        give(tmp_path / "run", tmp_path / "out")
        for n in range(1, EPOCH_PATCHES + 4):
            publisher.publish({"w": np.full(40, n, np.float32)})
    prune(publisher.store, keep_versions=2, keep_hours=0, grace_hours=0)
    with pytest.raises(MissingLinkError, match=r"version 0.* was pruned.*export to a new folder"):
        give(tmp_path / "run", tmp_path / "out")
    edit_index(tmp_path / "out" / "weight_v000000", pulse_run="another")
    with pytest.raises(ConflictError, match="is not version 0 of the run"):
        give(tmp_path / "run", tmp_path / "out")


def test_an_import_is_continued_when_there_are_more_folders(tmp_path: Path) -> None:
    states = make_states(6)
    base = write_stream(tmp_path, states)
    later = [tmp_path / "updates" / f"weight_v{n:06d}" for n in (4, 5)]
    for folder in later:
        folder.rename(tmp_path / folder.name)
    with DeltaImporter(tmp_path / "updates", str(tmp_path / "run"), base=base) as importer:
        assert len(importer.update()) == 4
        (tmp_path / later[0].name).rename(later[0])
        assert [one.version for one in importer.update()] == [4]
    (tmp_path / later[1].name).rename(later[1])
    assert [one.version for one in bring(tmp_path / "updates", tmp_path / "run", base)] == [5]
    assert bring(tmp_path / "updates", tmp_path / "run", base) == []
    assert_run(tmp_path / "run", states)


def test_a_signed_run_is_exported_to_who_trusts_its_key_and_an_import_signs(tmp_path: Path) -> None:
    states, key = make_states(2), SigningKey.generate()
    base = write_stream(tmp_path, states)
    with DeltaImporter(tmp_path / "updates", str(tmp_path / "run"), base=base, signing_key=key) as importer:
        importer.update()
    assert len(give(tmp_path / "run", tmp_path / "out", trust=key.public)) == 2
    with (
        pytest.raises(SignatureError),
        DeltaExporter(str(tmp_path / "run"), tmp_path / "not", trust=SigningKey.generate().public) as exporter,
    ):
        exporter.advance()


def test_an_import_with_a_key_continues_only_what_that_key_has_signed(tmp_path: Path) -> None:
    """Without this, another program could write a version for the importer to sign its next patches over."""
    states, key = make_states(2), SigningKey.generate()
    base = write_stream(tmp_path, states)
    for name, first in (("unsigned", None), ("signed by another", SigningKey.generate())):
        with DeltaImporter(tmp_path / "updates", str(tmp_path / name), base=base, signing_key=first) as importer:
            importer.advance()
        with (
            DeltaImporter(tmp_path / "updates", str(tmp_path / name), base=base, signing_key=key) as importer,
            pytest.raises(SignatureError),
        ):
            importer.advance()
        assert importer._tensors == {}, "nothing of it was loaded"


# What is refused


@pytest.fixture
def stream(tmp_path: Path) -> tuple[Path, Path, list[Weights]]:
    """Folders 1 to 3 and their base, and a run with the first two."""
    states = make_states(4)
    base = write_stream(tmp_path, states)
    last = tmp_path / "updates" / "weight_v000003"
    last.rename(tmp_path / "last")
    bring(tmp_path / "updates", tmp_path / "run", base)
    (tmp_path / "last").rename(last)
    shutil.rmtree(last)
    write_delta(tmp_path / "updates", 3, states[2], states[0])
    return tmp_path, last, states


def edit_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def rewrite(folder: Path, change: Any) -> None:
    """Let a function change names, frames and checksums of the first file of a folder."""
    import safetensors.numpy

    path = min(folder.glob("*.safetensors"))
    with safetensors.safe_open(path, framework="numpy") as file:
        frames, sums = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(frames, sums)
    path.write_bytes(safetensors.numpy.save(frames, metadata=sums))


def flip_frame(frames: Any, sums: Any) -> None:
    name = "model.embed.weight"
    plain = bytearray(zstandard.ZstdDecompressor().decompress(frames[name].tobytes()))
    plain[5] ^= 1
    frames[name] = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(plain)), np.uint8)


def cut_frame(frames: Any, sums: Any) -> None:
    frames["model.embed.weight"] = frames["model.embed.weight"][:-3]


def bomb(frames: Any, sums: Any) -> None:
    frames["model.embed.weight"] = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(1 << 20)), np.uint8)


def shorten(frames: Any, sums: Any) -> None:
    frames["model.embed.weight"] = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(8)), np.uint8)


def drop_checksum(frames: Any, sums: Any) -> None:
    del sums["model.embed.weight"]


def rename(frames: Any, sums: Any) -> None:
    frames["other"], sums["other"] = frames.pop("model.embed.weight"), sums.pop("model.embed.weight")


DAMAGE = {
    "a flipped bit": (flip_frame, ChecksumError, "does not match"),
    "a frame that is cut": (cut_frame, FormatError, "not a zstd frame"),
    "a frame that is too large": (bomb, FormatError, "larger than"),
    "a frame that is too short": (shorten, FormatError, "has 8 bytes"),
    "no checksum": (drop_checksum, FormatError, "has no checksum"),
    "another name than in the index": (rename, FormatError, "not in the index"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_before_anything_is_published_and_a_good_folder_then_goes_in(
    stream: tuple[Path, Path, list[Weights]], case: str
) -> None:
    tmp_path, last, states = stream
    change, error, text = DAMAGE[case]
    rewrite(last, change)
    with pytest.raises(error, match=text):
        bring(tmp_path / "updates", tmp_path / "run")
    assert_run(tmp_path / "run", states[:3])
    shutil.rmtree(last)
    write_delta(tmp_path / "updates", 3, states[2], states[1])
    assert [one.version for one in bring(tmp_path / "updates", tmp_path / "run")] == [3]
    assert_same(read_run(tmp_path / "run", states[1], 3), states[1])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"delta_encoding": "sum"}, UnsupportedError),
        ({"compression_format": "lz4"}, UnsupportedError),
        ({"checksum_format": "crc32"}, UnsupportedError),
        ({"version": "000004"}, FormatError),
        ({"base_version": 2}, FormatError),
        ({"base_version": "000001"}, MissingLinkError),
        pytest.param({"base_version": "0" * 5000}, FormatError, id="base_version of 5000 digits"),
        pytest.param({"version": "0" * 5000}, FormatError, id="version of 5000 digits"),
    ],
    ids=str,
)
def test_an_index_that_says_something_else_is_refused(
    stream: tuple[Path, Path, list[Weights]], changes: dict[str, Any], error: type[PulseError]
) -> None:
    tmp_path, last, states = stream
    edit_index(last, **changes)
    with pytest.raises(error, match="weight_v000003"):
        bring(tmp_path / "updates", tmp_path / "run")
    assert_run(tmp_path / "run", states[:3])


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", 3])
def test_an_index_that_names_files_elsewhere_is_refused(stream: tuple[Path, Path, list[Weights]], name: Any) -> None:
    tmp_path, last, _ = stream
    index = json.loads((last / INDEX).read_text())
    index["weight_map"]["model.embed.weight"] = name
    (last / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match="not a file in its own folder"):
        bring(tmp_path / "updates", tmp_path / "run")


def test_a_tensor_in_two_files_is_refused_because_xor_would_undo_itself(
    stream: tuple[Path, Path, list[Weights]],
) -> None:
    tmp_path, last, _ = stream
    file = min(last.glob("*.safetensors"))
    shutil.copy(file, last / "model-00009-of-00010.safetensors")
    with pytest.raises(FormatError, match="twice"):
        bring(tmp_path / "updates", tmp_path / "run")


def test_a_file_that_the_index_names_and_is_not_there_is_missed(stream: tuple[Path, Path, list[Weights]]) -> None:
    tmp_path, last, _ = stream
    min(last.glob("*.safetensors")).unlink()
    with pytest.raises(NotFoundError, match="lacks model-00000"):
        bring(tmp_path / "updates", tmp_path / "run")


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        (b"\x01", "not a count"),
        (np.array([2, 0], "<u4").tobytes() + b"\x01\x02", "not a count"),
        (np.array([1, 999_999], "<u4").tobytes() + b"\x01", "writes byte 999999"),
    ],
)
def test_positions_outside_of_a_tensor_are_refused(plain: bytes, text: str) -> None:
    frame = np.frombuffer(zstandard.ZstdCompressor().compress(plain), np.uint8)
    with pytest.raises(FormatError, match=text):
        delta_format.decode("overwrite", frame, np.zeros(100, np.uint8))


def test_overwrite_refuses_a_tensor_whose_positions_do_not_fit_32_bits() -> None:
    large = np.broadcast_to(np.uint8(0), (1 << 32) + 1)  # takes no memory
    with pytest.raises(LimitError, match="4 GiB"):
        delta_format.encode("overwrite", large, large)


def test_a_delta_without_its_base_asks_for_it(tmp_path: Path) -> None:
    write_stream(tmp_path, make_states(2))
    with pytest.raises(MissingLinkError, match="as base= or --base"):
        bring(tmp_path / "updates", tmp_path / "run")


def test_the_wrong_base_is_found_before_it_is_published_and_the_right_one_then_goes_in(tmp_path: Path) -> None:
    states = make_states(2)
    base = write_stream(tmp_path, states)
    write_checkpoint(tmp_path / "wrong", make_states(1, seed=5)[0])
    with pytest.raises(ChecksumError, match="made for other weights"):
        bring(tmp_path / "updates", tmp_path / "run", tmp_path / "wrong")
    write_checkpoint(tmp_path / "smaller", {"model.frozen": states[0]["model.frozen"]})
    with pytest.raises(StateError, match="the base does not have"):
        bring(tmp_path / "updates", tmp_path / "run", tmp_path / "smaller")
    assert not (tmp_path / "run").exists()
    assert [one.version for one in bring(tmp_path / "updates", tmp_path / "run", base)] == [0, 1]
    assert_run(tmp_path / "run", states)


def test_the_base_of_folders_that_begin_later_is_published_only_if_the_first_one_fits_it(tmp_path: Path) -> None:
    states = make_states(3)
    for name, state in zip(("first", "before"), states, strict=False):
        write_checkpoint(tmp_path / name, state)
    last = write_delta(tmp_path / "updates", 5, states[1], states[2])
    with pytest.raises(ChecksumError, match="made for other weights"):
        bring(tmp_path / "updates", tmp_path / "run", tmp_path / "first")
    edit_index(last, base_version="000002")
    with pytest.raises(MissingLinkError, match="delta to version 2"):
        bring(tmp_path / "updates", tmp_path / "run", tmp_path / "before")
    assert not (tmp_path / "run").exists()
    edit_index(last, base_version="000004")
    bring(tmp_path / "updates", tmp_path / "run", tmp_path / "before")
    assert_run(tmp_path / "run", states[1:])


def test_a_base_that_no_folder_is_made_against_is_not_published(tmp_path: Path) -> None:
    states = make_states(2)
    write_checkpoint(tmp_path / "base", make_states(1, seed=5)[0])
    write_checkpoint(tmp_path / "updates" / "weight_v000007", states[0])
    write_delta(tmp_path / "updates", 8, *states)
    assert len(bring(tmp_path / "updates", tmp_path / "run", tmp_path / "base")) == 2
    assert_run(tmp_path / "run", states)


@pytest.mark.parametrize("whole", ["base", "updates/weight_v000001"])
def test_files_that_change_or_shrink_after_they_were_read_change_nothing(tmp_path: Path, whole: str) -> None:
    states = make_states(4)
    base = write_stream(tmp_path, states[:2])
    if whole != "base":
        shutil.rmtree(tmp_path / whole)
        write_checkpoint(tmp_path / whole, states[1])
    with DeltaImporter(tmp_path / "updates", str(tmp_path / "run"), base=base) as importer:
        importer.update()
        for file in (tmp_path / whole).glob("*.safetensors"):
            data = file.read_bytes()
            with file.open("r+b") as opened:  # in place, as a copy over it does
                opened.write(bytes(byte ^ 1 for byte in data))
        write_delta(tmp_path / "updates", 2, states[1], states[2])
        assert len(importer.update()) == 1
        for file in (tmp_path / whole).glob("*.safetensors"):
            os.truncate(file, 0)  # what is still mapped ends the process with a bus error
        write_delta(tmp_path / "updates", 3, states[2], states[3])
        assert len(importer.update()) == 1
    assert_run(tmp_path / "run", states if whole == "base" else states[1:])


def test_a_run_that_was_not_made_from_the_folders_is_not_continued(tmp_path: Path) -> None:
    states = make_states(3)
    base = write_stream(tmp_path, states)
    for step in (0, 1, 2):  # of the base, of a delta, of a delta
        run = tmp_path / f"run-{step}"
        with Publisher(str(run)) as publisher:
            publisher.publish(make_states(1, seed=9)[0], step=step)
        with pytest.raises(StateError, match="not made from these folders"):
            bring(tmp_path / "updates", run, base)


def test_a_trainer_that_has_begun_anew_in_the_same_folder_is_noticed(tmp_path: Path) -> None:
    states = make_states(5)
    base = write_stream(tmp_path, states)
    with DeltaImporter(tmp_path / "updates", str(tmp_path / "run"), base=base) as importer:
        importer.update()
        shutil.rmtree(tmp_path / "updates")
        write_delta(tmp_path / "updates", 1, states[0], states[4])
        with pytest.raises(StateError, match="started over"):
            importer.update()
    with pytest.raises(StateError, match="started over"):
        bring(tmp_path / "updates", tmp_path / "run", base)
    assert_run(tmp_path / "run", states)


def test_folders_of_another_run_or_program_are_not_continued(tmp_path: Path) -> None:
    give(publish(tmp_path / "one", make_states(2)), tmp_path / "out")
    other = publish(tmp_path / "two", make_states(3, seed=1))
    with DeltaExporter(other, tmp_path / "out") as exporter, pytest.raises(ConflictError, match="is not version 1"):
        exporter.advance()
    write_stream(tmp_path, make_states(2))
    with pytest.raises(PulseError, match="contains other files"):
        DeltaExporter(other, tmp_path / "updates")
    with DeltaExporter(other, tmp_path / "new"), pytest.raises(ConflictError, match="another process"):
        DeltaExporter(other, tmp_path / "new")


def test_an_export_of_nothing_says_so_and_choices_are_checked(tmp_path: Path) -> None:
    with DeltaExporter(str(tmp_path / "none"), tmp_path / "out") as exporter, pytest.raises(NothingPublishedError):
        exporter.advance()
    with pytest.raises(ValueError, match="encoding must be one of"):
        DeltaExporter(str(tmp_path), tmp_path / "out", encoding="sum")  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="nowhere"):
        bring(tmp_path / "nowhere", tmp_path / "run")


@pytest.mark.parametrize("package", ["xxhash", "blake3"])
def test_a_checksum_whose_package_is_missing_names_the_extra(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    name: Any = {"xxhash": "xxh3-128", "blake3": "blake3"}[package]
    with pytest.raises(UnsupportedError, match=r"pip install 'pulsesync\[delta\]'"):
        DeltaExporter(str(tmp_path / "run"), tmp_path / "out", checksum=name)


# Interruptions


def test_a_folder_that_is_still_being_written_is_left_out_until_it_has_its_index(tmp_path: Path) -> None:
    states = make_states(3)
    base = write_stream(tmp_path, states)
    index = tmp_path / "updates" / "weight_v000002" / INDEX
    index.rename(tmp_path / "index")
    with DeltaImporter(tmp_path / "updates", str(tmp_path / "run"), base=base) as importer:
        assert len(importer.update()) == 2
        assert importer.incomplete == index.parent
        (tmp_path / "index").rename(index)
        assert len(importer.update()) == 1
        assert not importer.incomplete
    (tmp_path / "updates" / "weight_v000001" / INDEX).unlink()
    with pytest.raises(FormatError, match="was interrupted"):
        bring(tmp_path / "updates", tmp_path / "run", base)


def test_an_export_whose_disk_is_full_leaves_no_folder_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = make_states(3)
    run = publish(tmp_path / "run", states)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with DeltaExporter(run, tmp_path / "out") as exporter:
        exporter.advance()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(PulseError, match="No space left"):
                exporter.advance()
        assert [path.name for path in (tmp_path / "out").glob("weight_*")] == ["weight_v000000"]
        assert len(exporter.update()) == 2
    engine = EngineCheckpoint(tmp_path / "out" / "weight_v000000")
    engine.pull(tmp_path / "out", 2)
    assert_same(dict(engine.tensors), {name: flat(array) for name, array in states[2].items()})


def until_done(advance: Callable[[], DeltaVersion | None]) -> int:
    """Call something until it has nothing more to do, however often it fails; return how often it did."""
    failures = 0
    while failures < 1000:
        try:
            if advance() is None:
                return failures
        except PulseError:
            failures += 1
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", [0, *(slow(n) for n in (1, 2))])
def test_over_a_store_that_fails_both_ways_are_repeated_until_all_is_there(tmp_path: Path, seed: int) -> None:
    states, good = make_states(5), MemoryStore()
    base = write_stream(tmp_path, states)
    bad = FaultyStore(good, random.Random(seed), lost=0.1, unanswered=0.1)
    importer = DeltaImporter(tmp_path / "updates", bad, base=base)
    failures = until_done(importer.advance)
    with suppress(StoreError):
        importer.close()
    newest = RunReader(good, None).newest()
    assert newest is not None
    assert newest.step == 4
    assert_same(read_run(good, states[4], newest.version), states[4])
    worse = FaultyStore(good, random.Random(seed), lost=0.1, truncated=0.05, flipped=0.05)
    with DeltaExporter(worse, tmp_path / "out") as exporter:
        failures += until_done(exporter.advance)
    engine = EngineCheckpoint(tmp_path / "out" / "weight_v000000")
    engine.pull(tmp_path / "out", newest.version)
    assert_same(dict(engine.tensors), {name: flat(array) for name, array in states[4].items()})
    assert failures


KILLED = """
import os, signal, sys
from pulsesync.integrations.delta_folder import DeltaExporter, DeltaImporter
fsync, left = os.fsync, int(sys.argv[4])
def counted(handle):
    global left
    fsync(handle)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = counted
if sys.argv[1] == "export":
    DeltaExporter(sys.argv[2], sys.argv[3]).update()
else:
    DeltaImporter(sys.argv[2], sys.argv[3], base=sys.argv[5]).update()
"""


def kill_at(write: int, *arguments: str) -> None:
    """Run an export or import in a process that is killed after this many writes have reached the disk."""
    with Forked(KILLED, *arguments[:3], write, *arguments[3:], kernels=True) as process:
        assert process.wait(60) == -signal.SIGKILL, process.stderr.read()


@pytest.mark.parametrize("write", [1, 5, *(slow(n) for n in (3, 7))])
def test_an_export_that_was_killed_leaves_only_whole_folders_and_is_continued(tmp_path: Path, write: int) -> None:
    states = make_states(4)
    run = publish(tmp_path / "run", states)
    kill_at(write, "export", run, str(tmp_path / "out"))
    for folder in (tmp_path / "out").glob("weight_v*"):
        index = json.loads((folder / INDEX).read_text())  # is there, and so are all that it names
        assert all((folder / file).exists() for file in index["weight_map"].values())
    give(run, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".weight*"))
    engine = EngineCheckpoint(tmp_path / "out" / "weight_v000000")
    engine.pull(tmp_path / "out", 3)
    assert_same(dict(engine.tensors), {name: flat(array) for name, array in states[3].items()})


@pytest.mark.parametrize("write", [9, *(slow(n) for n in (2, 14))])
def test_an_import_that_was_killed_is_continued(tmp_path: Path, write: int) -> None:
    states = make_states(4)
    base = write_stream(tmp_path, states)
    kill_at(write, "import", str(tmp_path / "updates"), str(tmp_path / "run"), str(base))
    bring(tmp_path / "updates", tmp_path / "run", base)
    steps = []
    for version in range(int((tmp_path / "run" / "head").read_text()) + 1):
        weights = {name: np.zeros_like(array) for name, array in states[0].items()}
        try:
            report = Subscriber(str(tmp_path / "run")).sync(weights, version=version)
        except NothingPublishedError:  # the first anchor was never written: the base was published again
            assert version == 0
            continue
        assert_same(weights, states[report.step])
        steps.append(report.step)
    assert sorted(set(steps)) == [0, 1, 2, 3]


# The commands


def test_the_commands_export_and_import(tmp_path: Path) -> None:
    states = make_states(4)
    run = publish(tmp_path / "run", states)
    told = pulse("export", run, str(tmp_path / "out"), "--from", "1", "--to", "2", "--json")
    assert [json.loads(line)["kind"] for line in told.out.splitlines()] == ["checkpoint", "delta"]
    assert "version 3 as" in pulse("export", run, str(tmp_path / "out")).out
    assert "nothing to write" in pulse("export", run, str(tmp_path / "out")).err
    told = pulse("import", str(tmp_path / "out"), str(tmp_path / "back"))
    assert told.out.count("as version") == 3
    assert_run(tmp_path / "back", states[1:])
    assert "nothing to publish" in pulse("import", str(tmp_path / "out"), str(tmp_path / "back")).err
    refused = pulse("export", str(tmp_path / "none"), str(tmp_path / "x"))
    assert refused.refused(3, "there is no run")
    assert "wait_s" not in refused.err  # is no option of the command
    assert pulse("export", run, str(tmp_path / "y"), "--from", "3", "--to", "2").refused(2, "got --to 2 and --from 3")
    assert pulse("export", run, str(tmp_path / "y"), "--from", "9").refused(1, "version 9 is not published")
