"""Trainers' writers and an engine's reader of delta folders, made from the sources of slime, miles and SkyRL.

Independent of `pulsesync`: plain numpy, zstandard and the safetensors library. The commits that were read are named in
docs/integrations/other_trainers.md.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import safetensors.numpy
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
Weights = Mapping[str, np.ndarray[Any, Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

HASHES = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: format(zlib.adler32(data), "08x"),
}


def flat(array: np.ndarray[Any, Any]) -> Bytes:
    return np.frombuffer(array.tobytes(), np.uint8)


def write_checkpoint(folder: Path, weights: Weights) -> None:
    """What `save_pretrained` leaves for a small model."""
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(dict(weights), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "test"}')


def write_delta(
    root: Path,
    version: int,
    old: Weights,
    new: Weights,
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    ranks: int = 2,
) -> Path:
    """One sync of a trainer whose pipeline stages write a file each, and rank 0 the index at the end."""
    folder = root / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    shares: list[dict[str, Bytes]] = [{} for _ in range(ranks)]
    sums: list[dict[str, str]] = [{} for _ in range(ranks)]
    for place, name in enumerate(new):
        before, after = flat(old[name]), flat(new[name])
        where = np.flatnonzero(before != after)
        if not where.size:
            continue
        if encoding == "xor":
            plain = (before ^ after).tobytes()
        else:
            plain = np.uint32(where.size).tobytes() + where.astype("<u4").tobytes() + after[where].tobytes()
        frame = zstandard.ZstdCompressor(level=1).compress(plain)
        shares[place % ranks][name] = np.frombuffer(frame, np.uint8)
        sums[place % ranks][name] = HASHES[checksum](after.tobytes())
    writers = [rank for rank in range(ranks) if shares[rank]]
    weight_map: dict[str, str] = {}
    for number, rank in enumerate(writers):
        file = f"model-{number:05d}-of-{len(writers):05d}.safetensors"
        (folder / file).write_bytes(safetensors.numpy.save(shares[rank], metadata=sums[rank]))
        weight_map |= dict.fromkeys(shares[rank], file)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return folder


class EngineCheckpoint:
    """An engine's local checkpoint: tensors as bytes, taken from a full version and patched by each delta."""

    def __init__(self, base: Path | None = None) -> None:
        self.tensors: dict[str, Bytes] = {}
        self.types: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.version = 0
        if base is not None:
            self._copy(base)

    def _copy(self, folder: Path) -> None:
        self.tensors.clear()
        for path in folder.glob("*.safetensors"):
            for name, entry in safetensors.deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
                self.tensors[name] = np.frombuffer(entry["data"], np.uint8).copy()
                self.types[name] = (entry["dtype"], tuple(entry["shape"]))

    def pull(self, root: Path, target: int) -> None:
        """Begin at the newest full version up to the target, if it is newer than this; then apply delta after delta."""
        full = target
        while full > self.version and self._metadata(root, full) is not None:
            full -= 1
        if full > self.version:
            self._copy(root / f"weight_v{full:06d}")
            self.version = full
        while self.version < target:
            self._apply(root / f"weight_v{self.version + 1:06d}")

    def _metadata(self, root: Path, version: int) -> dict[str, Any] | None:
        """What the index of a delta says; None for a full version."""
        folder = root / f"weight_v{version:06d}"
        assert folder.is_dir()
        if not (folder / INDEX).exists():
            return None
        metadata: dict[str, Any] = json.loads((folder / INDEX).read_text())["metadata"]
        return metadata if "delta_encoding" in metadata else None

    def _apply(self, folder: Path) -> None:
        metadata = json.loads((folder / INDEX).read_text())["metadata"]
        assert int(metadata["base_version"]) == self.version
        assert metadata["compression_format"] == "zstd"
        for path in sorted(folder.glob("*.safetensors")):
            with safetensors.safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    delta = zstandard.ZstdDecompressor().decompress(file.get_tensor(name).tobytes())
                    self._patch(name, metadata["delta_encoding"], delta)
                    actual = HASHES[metadata["checksum_format"]](self.tensors[name].tobytes())
                    assert actual == file.metadata()[name], f"{name} in {path}"
        self.version = int(metadata["version"])

    def _patch(self, name: str, encoding: str, delta: bytes) -> None:
        if encoding == "xor":
            self.tensors[name] ^= np.frombuffer(delta, np.uint8)
            return
        assert encoding == "overwrite"
        count = int.from_bytes(delta[:4], "little")
        self.tensors[name][np.frombuffer(delta, "<u4", count, 4)] = np.frombuffer(delta, np.uint8, count, 4 + 4 * count)


def write_skyrl_delta(root: Path, version: int, old: Weights, new: Weights, *, checksum: str = "xxh3-128") -> Path:
    """One sync of SkyRL's `delta` backend: rank 0 writes files of few tensors each, and a manifest at the end."""
    folder = root / f"delta-{version:08d}"
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for name in new:
        before, after = flat(old[name]), flat(new[name])
        if np.array_equal(before, after):
            continue
        frame = zstandard.ZstdCompressor(level=1).compress((before ^ after).tobytes())
        file = f"delta-rank00000-file{len(records):06d}.safetensors"
        safetensors.numpy.save_file({name: np.frombuffer(frame, np.uint8)}, folder / file)
        hashed = (
            hashlib.sha256(after.tobytes()).hexdigest() if checksum == "sha256" else HASHES[checksum](after.tobytes())
        )
        records.append(
            {
                "name": name,
                "dtype": str(new[name].dtype),
                "shape": list(new[name].shape),
                "uncompressed_num_bytes": after.size,
                "compressed_num_bytes": len(frame),
                "payload_file": file,
                "payload_key": name,
                "checksum": hashed,
                "checksum_algorithm": checksum,
            }
        )
    manifest = {
        "version": version,
        "base_version": version - 1,
        "tensors": records,
        "total_uncompressed_num_bytes": sum(record["uncompressed_num_bytes"] for record in records),
        "total_compressed_num_bytes": sum(record["compressed_num_bytes"] for record in records),
        "payload_files": [record["payload_file"] for record in records],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
