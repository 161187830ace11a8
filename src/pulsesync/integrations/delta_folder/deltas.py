"""The bytes of a delta folder, as slime, miles and stitch write and read them; docs/integrations/other_trainers.md.

    weight_v000005/
        model.safetensors.index.json       version, base_version, delta_encoding, compression_format, checksum_format
        model-00000-of-00001.safetensors   for each tensor that changed, a zstd frame of what changed, as U8; and in
                                           __metadata__ the checksum of the entire new tensor

A folder whose index has no `delta_encoding` is an ordinary checkpoint. Deltas contain bytes, without dtypes.

SkyRL's folders are read as well: `delta-00000005/`, with a `manifest.json` that names files and checksums.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulsesync.errors import ChecksumError, FormatError, LimitError, NotFoundError, UnsupportedError
from pulsesync.format.json_reader import load_json
from pulsesync.state.checkpoint_files import INDEX, SHARD_BYTES, open_file, read_metadata, reading_from

Octets: TypeAlias = NDArray[np.uint8]
Encoding: TypeAlias = Literal["xor", "overwrite"]
Checksum: TypeAlias = Literal["xxh3-128", "blake3", "adler32"]

NAMES = {"weight_v": 6, "delta-": 8}  # what the names of folders begin with, and the digits that follow
MANIFEST = "manifest.json"  # of SkyRL
COMPRESSION = "zstd"  # the only one that their readers support
MAX_INDEX_BYTES = 100_000_000
MAX_DIGITS = 18  # of a version


def folder_name(version: int, prefix: str = "weight_v") -> str:
    return f"{prefix}{version:0{NAMES[prefix]}d}"


def folder_version(path: Path) -> int | None:
    """Return the version in the name of a folder; None if it is not a version's folder."""
    for prefix in NAMES:
        digits = path.name.removeprefix(prefix)
        if digits.isascii() and digits.isdigit() and folder_name(int(digits), prefix) == path.name:
            return int(digits)
    return None


def octets(tensor: Any) -> Octets:
    """Return the bytes of a contiguous tensor, in place."""
    return tensor.reshape(-1).view(np.uint8)  # type: ignore[no-any-return]


# Checksums


def checksum(algorithm: str, data: Octets) -> str:
    """Return the checksum of some bytes, as text. Raises: UnsupportedError, if it is unknown or not installed."""
    if algorithm == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    if algorithm == "sha256":  # only in manifests of SkyRL
        return hashlib.sha256(data.data).hexdigest()
    if algorithm == "xxh3-128":
        return str(_package("xxhash", algorithm).xxh3_128_hexdigest(data))
    if algorithm == "blake3":
        return str(_package("blake3", algorithm).blake3(data).hexdigest())
    raise UnsupportedError(f"checksum_format must be one of {', '.join(get_args(Checksum))}; got {algorithm!r}")


def _package(name: str, algorithm: str) -> Any:
    try:
        return import_module(name)
    except ImportError as e:
        raise UnsupportedError(
            f"the checksum {algorithm} needs the package {name}, which is not installed: pip install 'pulsesync[delta]'"
        ) from e


# One tensor


def encode(encoding: Encoding, old: Octets, new: Octets) -> bytes | None:
    """Return the compressed delta from a tensor's old bytes to the new ones; None: the same. Raises: LimitError."""
    if encoding == "overwrite" and new.size > 1 << 32:
        raise LimitError(
            "overwrite cannot name a byte beyond 4 GiB of a tensor; use xor", value=new.size, limit=1 << 32
        )
    changed = old != new
    if not changed.any():
        return None
    if encoding == "xor":
        return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)
    at = np.flatnonzero(changed).astype("<u4")
    plain = np.concatenate([np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), new[changed]])
    return zstandard.ZstdCompressor(level=1).compress(plain.data)


def decode(encoding: str, frame: Octets, old: Octets) -> Octets:
    """Return the new bytes of a tensor; the old ones do not change. Raises: FormatError, if the frame does not fit."""
    if encoding == "xor":
        flips = _decompress(frame, old.size)
        if flips.size != old.size:
            raise FormatError(f"its delta has {flips.size} bytes, but the tensor has {old.size}")
        return old ^ flips
    plain = _decompress(frame, 4 + 5 * old.size)
    count = int(plain[:4].view("<u4")[0]) if plain.size >= 4 else -1
    if plain.size != 4 + 5 * count:
        raise FormatError(f"its delta has {plain.size} bytes, which are not a count, positions and values")
    at = plain[4 : 4 + 4 * count].view("<u4")
    if count and int(at.max()) >= old.size:
        raise FormatError(f"its delta writes byte {int(at.max())}, but the tensor has only {old.size}")
    new = old.copy()
    new[at] = plain[4 + 4 * count :]
    return new


def _decompress(frame: Octets, limit: int) -> Octets:
    """Return the content of a zstd frame of at most `limit` bytes; the size that the frame states is not trusted."""
    data = frame.tobytes()
    try:
        if zstandard.frame_content_size(data) > limit:
            raise FormatError(f"its delta is larger than {limit} bytes, the most that this tensor can need")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=max(limit, 1), allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise FormatError(f"its delta is not a zstd frame of at most {limit} bytes: {e}") from e
    return np.frombuffer(plain, np.uint8)


# One folder


@dataclass(frozen=True)
class DeltaVersion:
    """A version that was exported or imported."""

    version: int  # of the run
    folder: Path  # the folder that was written or read
    is_delta: bool  # False for a complete checkpoint
    tensors: int  # in the folder
    size_bytes: int  # of its weight files


def find_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of versions in a folder, in order."""
    with reading_from(folder):
        found = [(folder_version(path), path) for path in folder.iterdir() if path.is_dir()]
    named = sorted((version, path) for version, path in found if version is not None)
    if len(named) != len(folders := dict(named)):
        raise FormatError(
            f"{folder} has both weight_v… and delta-… folders, which different programs write; give each program a "
            "folder of its own"
        )
    return folders


@dataclass(frozen=True)
class TensorDelta:
    """The change of one tensor to the next version."""

    frame: Octets
    algorithm: str  # of the checksum
    checksum: str  # of the entire new tensor


@dataclass(frozen=True)
class FolderIndex:
    """The index of a version's folder."""

    folder: Path
    metadata: Mapping[str, Any]
    weight_map: Mapping[str, str]
    checksums: Mapping[str, tuple[str, str]] | None = None  # algorithm and text by tensor; None: the files have them

    @property
    def is_delta(self) -> bool:
        return "delta_encoding" in self.metadata

    @property
    def base_version(self) -> int:
        return int(self.metadata["base_version"])

    @property
    def size_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in set(self.weight_map.values()))


def read_index(folder: Path) -> FolderIndex | None:
    """Read and check a folder's index; None if there is none, as in a checkpoint of one file. Raises: FormatError."""
    if (table := _load(folder / MANIFEST)) is not None:
        index = _from_manifest(folder, table)
    elif (table := _load(folder / INDEX)) is not None:
        metadata, weight_map = table.get("metadata", {}), table.get("weight_map")
        if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
            raise FormatError(f"{folder / INDEX} must be a JSON object with metadata and weight_map, and is not")
        index = FolderIndex(folder, metadata, weight_map)
    else:
        return None
    if strange := [name for name in index.weight_map.values() if not isinstance(name, str) or Path(name).name != name]:
        raise FormatError(f"the index of {folder} names a file {strange[0]!r}, which is not a file in its own folder")
    if index.is_delta:
        _check_delta(index)
    return index


def _load(path: Path) -> dict[str, Any] | None:
    try:
        with reading_from(path), path.open("rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
    except NotFoundError:
        return None
    if len(data) > MAX_INDEX_BYTES:
        raise LimitError(f"{path} is too large", value=len(data), limit=MAX_INDEX_BYTES)
    return load_json(data, str(path))


def _from_manifest(folder: Path, table: Mapping[str, Any]) -> FolderIndex:
    """Convert a manifest of SkyRL to an index."""
    files: dict[str, Any] = {}
    sums: dict[str, tuple[str, str]] = {}
    renamed = False
    try:
        for entry in table["tensors"]:
            name, algorithm = str(entry["name"]), str(entry.get("checksum_algorithm", "xxh3-128"))
            files[name], sums[name] = entry["payload_file"], (algorithm, str(entry["checksum"]))
            renamed |= entry["payload_key"] != entry["name"]
        version, base = table["version"], table["base_version"]
    except (KeyError, TypeError, AttributeError) as e:
        raise FormatError(f"{folder / MANIFEST} is not a manifest of deltas: {e!r}") from e
    if renamed or len(files) != len(table["tensors"]):
        raise FormatError(f"{folder / MANIFEST} has a tensor twice, or under another name than in its file")
    metadata = delta_metadata(version, "xor", "xxh3-128") if type(version) is int is type(base) else {}
    return FolderIndex(folder, metadata | {"delta_encoding": "xor", "base_version": str(base)}, files, sums)


def _check_delta(index: FolderIndex) -> None:
    said, where = index.metadata, index.folder
    for key in ("version", "base_version"):
        text = said.get(key)
        if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise FormatError(f"{where}: {key} must be a number as text, such as '000005'; got {text!r:.50}")
    if int(said["version"]) != folder_version(index.folder):
        raise FormatError(
            f"{where} names version {said['version']}, but its folder is named for another one; rename the folder, or "
            "write it again"
        )
    choices = (
        ("delta_encoding", get_args(Encoding)),
        ("compression_format", (COMPRESSION,)),
        ("checksum_format", get_args(Checksum)),
    )
    for key, known in choices:
        if said.get(key) not in known:
            raise UnsupportedError(f"{where}: {key} must be one of {', '.join(known)}; got {said.get(key)!r}")


def read_deltas(index: FolderIndex) -> dict[str, TensorDelta]:
    """Read all deltas of a folder. Raises: FormatError, if files and index disagree, or a tensor has no checksum."""
    deltas: dict[str, TensorDelta] = {}
    files = sorted(path.name for path in index.folder.glob("*.safetensors"))  # slime's reader applies all of them
    if absent := sorted(set(index.weight_map.values()) - set(files)):
        raise NotFoundError(f"{index.folder} lacks {absent[0]}, which its index names", key=str(index.folder))
    for file in files:
        algorithm = str(index.metadata["checksum_format"])
        sums = index.checksums or {n: (algorithm, text) for n, text in read_metadata(index.folder / file).items()}
        for name, frame in open_file(index.folder / file).items():
            if name in deltas or index.weight_map.get(name) != file:
                raise FormatError(f"{index.folder}: tensor {name!r} of {file} occurs twice or is not in the index")
            if name not in sums or frame.dtype != np.uint8:
                raise FormatError(f"{index.folder / file}: tensor {name!r} has no checksum, or is not of bytes")
            deltas[name] = TensorDelta(frame.reshape(-1), *sums[name])
    if absent := sorted(index.weight_map.keys() - deltas.keys()):
        raise FormatError(f"{index.folder}: no file has tensor {absent[0]!r}, which the index names", tensor=absent[0])
    return deltas


def decode_tensor(index: FolderIndex, name: str, delta: TensorDelta, old: Octets) -> Octets:
    """Return the new bytes of a tensor. Raises: ChecksumError, if their checksum is wrong; FormatError."""
    try:
        new = decode(index.metadata["delta_encoding"], delta.frame, old)
    except FormatError as e:
        raise FormatError(f"{index.folder}, tensor {name!r}: {e}", tensor=name) from e
    if (actual := checksum(delta.algorithm, new)) != delta.checksum:
        raise ChecksumError(
            f"{index.folder}: the checksum of tensor {name!r} does not match: the delta is damaged, or made for other "
            "weights; have it written again, or pass the base that the engines started with",
            tensor=name,
            expected=delta.checksum,
            actual=actual,
        )
    return new


def delta_files(deltas: Mapping[str, tuple[bytes, str]]) -> tuple[dict[str, list[bytes]], dict[str, str]]:
    """Return the files of frames with their checksums, as pieces to write one after the other; and the weight_map."""
    groups: list[dict[str, tuple[bytes, str]]] = []
    filled = 0
    for name in sorted(deltas, key=str.encode):
        size = len(deltas[name][0])
        if not groups or filled + size > SHARD_BYTES:
            groups.append({})
            filled = 0
        groups[-1][name] = deltas[name]
        filled += size
    named = {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups)}
    weight_map = {name: file for file, group in named.items() for name in group}
    return {file: _file(group) for file, group in named.items()}, weight_map


def _file(deltas: Mapping[str, tuple[bytes, str]]) -> list[bytes]:
    table: dict[str, Any] = {"__metadata__": {name: text for name, (_, text) in deltas.items()}}
    at = 0
    for name, (frame, _) in deltas.items():
        table[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [at, at + len(frame)]}
        at += len(frame)
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, *(frame for frame, _ in deltas.values())]


def index_bytes(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    return json.dumps({"metadata": dict(metadata), "weight_map": dict(weight_map)}).encode()


def delta_metadata(version: int, encoding: Encoding, algorithm: Checksum) -> dict[str, str]:
    """Return the metadata of a delta's index: all values are text, as other writers have it."""
    return {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": COMPRESSION,
        "checksum_format": algorithm,
    }
