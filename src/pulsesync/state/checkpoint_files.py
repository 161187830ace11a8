"""Safetensors files as arrays on mapped memory: checkpoints to publish, and folders of weights to be written in place.

    checkpoint = open_checkpoint("checkpoint-1200")             # a file, or a folder with shards or without
    Publisher("runs/one", files=checkpoint.files).publish(checkpoint.tensors)

Nothing is read before it is used, and nothing copied. The other files of a folder that a loader needs (config.json, the
tokenizer) are its companions.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import DTYPES, TensorSpec
from pulsesync.errors import FormatError, LimitError, NotFoundError, StoreError, UnsupportedError
from pulsesync.format.json_reader import load_json
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import MAX_FILE_BYTES, is_file_name
from pulsesync.state.views import new_tensors

Array = NDArray[Any]

MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
SHARD_BYTES = 5_000_000_000  # of weights in a file, as Hugging Face cuts them
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as PEFT and vLLM look for them

# Companions: all that transformers and tokenizers load, but no code and nothing that is unpickled.
_COMPANIONS = (
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.*",
    "chat_template*",
    "*.jinja",
)
_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")  # one of them is enough
_NEVER = ("*.safetensors", "*.index.json", "*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a training run has saved: its tensors, mapped from disk, and the companions of its folder."""

    tensors: Mapping[str, Array]
    files: Mapping[str, bytes]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.tensors.values())


def open_checkpoint(path: str | Path, *, private: bool = False) -> Checkpoint:
    """Open a safetensors file, or a folder of them as transformers writes it.

    The arrays are read-only; with private=True they can also be written, which changes memory and never the files.

    Raises:
        NotFoundError: there is no such file; FormatError: or a subclass, for files that are not safetensors, or
        an index that does not match them.
    """
    path = Path(path)
    with reading_from(path):
        if not path.is_dir():
            return Checkpoint(open_file(path, private=private), {})
        tensors: dict[str, Array] = {}
        names, wanted = _weight_files(path)
        for name in names:
            found = open_file(path / name, private=private)
            if twice := sorted(tensors.keys() & found.keys()):
                raise FormatError(f"tensor {twice[0]!r} is in two files of {path}", tensor=twice[0])
            tensors |= found
        if missing := sorted(wanted - tensors.keys()):
            raise FormatError(f"the index of {path} lists tensor {missing[0]!r}, which no file has", tensor=missing[0])
        return Checkpoint(tensors, companions(path))


def _weight_files(folder: Path) -> tuple[list[str], set[str]]:
    """The files that make up a checkpoint, and the tensors that an index lists."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / INDEX
    index = preferred if preferred in indices else indices[0] if len(indices) == 1 else None
    if index is not None:
        named = load_json(index.read_bytes(), str(index)).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise FormatError(f"{index} has no weight_map that maps tensors to files")
        names = sorted(set(named.values()))
        if strange := [name for name in names if Path(name).name != name]:
            raise FormatError(f"{index} lists file {strange[0]!r}, which is not in its folder")
        return names, set(named)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"], set()
    if len(found) != 1:
        found_text = "no safetensors file" if not found else f"{len(found)} safetensors files and no index"
        raise NotFoundError(f"{folder} has {found_text}: name one file, or a folder with {INDEX}", key=str(folder))
    return found, set()


def is_companion(name: str) -> bool:
    """Whether a file is published with the weights: it is read by a loader, is not code, and a run can name it."""
    fits = is_file_name(name) and any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
    return fits and name != "pulse.json" and not any(fnmatchcase(name, pattern) for pattern in _NEVER)


def companions(folder: Path) -> dict[str, bytes]:
    """The companions of a checkpoint's folder. Raises: LimitError, for one that is too large."""
    out = {}
    for path in sorted(folder.iterdir()):
        if is_companion(path.name) and path.is_file():
            if path.stat().st_size > MAX_FILE_BYTES:
                raise LimitError(f"{path} is larger than {MAX_FILE_BYTES} bytes, the limit for a companion file")
            out[path.name] = path.read_bytes()
    return out


def missing_companions(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """The files that `from_pretrained` needs next to the weights and will not find among these companions.

    A model needs its configuration; a language model, whose configuration has a vocabulary size, also needs a
    tokenizer. An adapter needs only its own configuration.
    """
    if ADAPTER_CONFIG in files:
        return ()
    if "config.json" not in files:
        return ("config.json",)
    try:
        config = json.loads(files["config.json"])  # it may contain Infinity, as those of some models do
    except (ValueError, RecursionError):
        return ()
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    reads_text = any(isinstance(part, dict) and "vocab_size" in part for part in parts)
    has_tokenizer = any(fnmatchcase(name, pattern) for name in files for pattern in _TOKENIZERS)
    return ("tokenizer.json or tokenizer.model",) if reads_text and not has_tokenizer else ()


# One file


def open_file(path: Path, *, private: bool = False) -> dict[str, Array]:
    """The tensors of one safetensors file, on mapped memory. Raises: NotFoundError, FormatError, UnsupportedError."""
    with reading_from(path), path.open("rb") as file:
        size, begin, table = _read_header(file, path)
        entries = _check_table(table, begin, size, path)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
    arrays = {}
    for spec, at in entries:
        array = _array(mapped, spec, begin + at)
        # If the length of the header is not a multiple of eight, weights are not aligned: such tensors are copied.
        arrays[spec.name] = array if array.flags.aligned else array.copy()
    return arrays


def read_metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` of a safetensors file. Raises: NotFoundError, FormatError."""
    with reading_from(path), path.open("rb") as file:
        metadata = _read_header(file, path)[2].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise FormatError(f"{path} has a __metadata__ that does not map strings to strings")
    return metadata


def _read_header(file: IO[bytes], path: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the size of a file, where its data begins, and the table of its header. Raises: FormatError."""
    size, length = os.fstat(file.fileno()).st_size, file.read(8)
    count = int.from_bytes(length, "little")
    if len(length) < 8 or not 2 <= count <= min(MAX_HEADER_BYTES, size - 8):
        raise FormatError(f"{path} is not a safetensors file, or is cut off")
    return size, 8 + count, load_json(file.read(count), f"the header of {path}")


def _check_table(table: dict[str, Any], begin: int, size: int, path: Path) -> list[tuple[TensorSpec, int]]:
    """Check the table of a header as safetensors does; return each tensor with its offset in the data."""
    table.pop("__metadata__", None)
    entries, spans = [], []
    for name, entry in table.items():
        try:
            (start, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
            whole = all(type(n) is int and n >= 0 for n in (start, end, *shape))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise FormatError(f"{path} is not a valid safetensors file: bad entry for tensor {name!r}", tensor=name)
        if dtype not in DTYPES:
            raise UnsupportedError(f"tensor {name!r} has dtype {dtype}; supported are {', '.join(DTYPES)}", tensor=name)
        if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise FormatError(f"in {path}, the bytes of tensor {name!r} do not match its shape", tensor=name)
        entries.append((TensorSpec(name, dtype, shape), start))
        spans.append((start, end))
    at = 0
    for start, end in sorted(spans):
        if start != at:
            raise FormatError(f"{path} is not a valid safetensors file: its tensors overlap, or leave gaps")
        at = end
    if begin + at != size:
        raise FormatError(f"{path} must have {begin + at} bytes by its header; it has {size}")
    return entries


@cache
def _dtype(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = new_tensors([TensorSpec("", name, (0,))])[""].dtype
    return dtype


def _array(mapped: mmap.mmap, spec: TensorSpec, offset: int) -> Array:
    if not spec.size:
        return np.zeros(spec.shape, _dtype(spec.dtype))
    return np.ndarray(spec.shape, _dtype(spec.dtype), mapped, offset)


# Folders to be written in place


@dataclass(frozen=True)
class WeightFile:
    """One weight file of a layout: every byte except the weights."""

    name: str
    head: bytes  # length and header
    size: int  # bytes, of the whole file
    places: tuple[tuple[TensorSpec, int], ...]  # tensors as the layout names them, and where they begin in the file


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a layout, as transformers would cut and name them, and their index if there are several."""

    shards: tuple[WeightFile, ...]
    index: bytes | None

    @property
    def files(self) -> frozenset[str]:
        return frozenset([*(shard.name for shard in self.shards), *([INDEX] if self.index else [])])


def plan_files(layout: Layout, *, adapter: bool = False) -> WeightFiles:
    """Return the files for a layout, with one of each set of tied tensors, under the name that loaders look for.

    The weights of an adapter are in one file, however large: PEFT reads no other.
    """
    stored = stored_names(layout)
    if adapter:
        return WeightFiles((_shard(ADAPTER_WEIGHTS, layout.tensors, stored),), None)
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in layout.tensors:
        size = spec.size * spec.kind.itemsize
        if groups[-1] and filled + size > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    if len(groups) == 1:
        return WeightFiles((_shard("model.safetensors", groups[0], stored),), None)
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    shards = tuple(_shard(name, group, stored) for name, group in zip(names, groups, strict=True))
    table = {
        "metadata": {"total_size": sum(spec.size * spec.kind.itemsize for spec in layout.tensors)},
        "weight_map": {stored[spec.name]: shard.name for shard in shards for spec, _ in shard.places},
    }
    return WeightFiles(shards, json.dumps(table, indent=2, sort_keys=True).encode() + b"\n")


def stored_names(layout: Layout) -> dict[str, str]:
    """The name under which each tensor is in a file.

    Transformers keeps the embedding and drops what is tied to it, and vLLM skips an lm_head that is tied; the layout's
    own choice is the first by name, which for most models is lm_head.weight.
    """
    names = {spec.name: [spec.name] for spec in layout.tensors}
    for alias, name in layout.ties.items():
        names[name].append(alias)

    def rank(name: str) -> int:
        parts = name.split(".")
        return 0 if "shared" in parts else 1 if "wte" in parts or "embed" in name else 2

    return {name: min(sorted(group), key=rank) if len(group) > 1 else name for name, group in names.items()}


def by_layout(layout: Layout, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors of a checkpoint under the names of a layout: an alias stands for a tensor that is not there itself."""
    out = dict(tensors)
    for alias, name in layout.ties.items():
        if alias in tensors:
            out.setdefault(name, tensors[alias])
    return out


def _shard(name: str, specs: Iterable[TensorSpec], stored: Mapping[str, str]) -> WeightFile:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, at = [], 0
    for spec in sorted(specs, key=lambda s: (-s.kind.itemsize, s.name.encode())):  # so that each is aligned
        end = at + spec.size * spec.kind.itemsize
        table[stored[spec.name]] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        places.append((spec, at))
        at = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    return WeightFile(name, head, len(head) + at, tuple((spec, len(head) + start) for spec, start in places))


class TensorFolder:
    """The weights of a layout, in the files of a folder, mapped so that writing the arrays writes the files.

    The files must exist: `fits` checks that they do, `create` makes them, with zeros for weights.
    """

    def __init__(self, folder: Path, plan: WeightFiles) -> None:
        self.folder, self.plan = folder, plan
        self.arrays: dict[str, Array] = {}  # by the layout's names
        self._maps: list[tuple[WeightFile, mmap.mmap]] = []
        self._opened: list[os.stat_result] = []
        for shard in plan.shards:
            with writing(folder / shard.name) as path, path.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), shard.size)
                self._opened.append(os.fstat(file.fileno()))
            self._maps.append((shard, mapped))
            self.arrays |= {spec.name: _array(mapped, spec, at) for spec, at in shard.places}

    @staticmethod
    def fits(folder: Path, plan: WeightFiles) -> bool:
        """Whether the files of a plan, no links, are in a folder, by their sizes and headers but not their weights."""
        try:
            for shard in plan.shards:
                path = folder / shard.name
                with path.open("rb") as file:
                    fits = os.fstat(file.fileno()).st_size == shard.size and file.read(len(shard.head)) == shard.head
                if not fits or path.is_symlink():
                    return False
        except OSError:
            return False
        return True

    @staticmethod
    def create(folder: Path, plan: WeightFiles) -> None:
        """Make the files of a plan, with room on the disk for all of their weights. Raises: StoreError.

        Existing files are replaced, not changed: another process may have mapped them.
        """
        for shard in plan.shards:
            with writing(folder / shard.name) as path:
                path.unlink(missing_ok=True)
                with path.open("xb") as file:
                    file.write(shard.head)
                    file.flush()
                    os.posix_fallocate(file.fileno(), 0, shard.size)  # a full disk is an error here, a signal later

    @property
    def in_place(self) -> bool:
        """Whether the files under these names are the ones that are mapped, with the right sizes and headers."""
        try:
            found = [(self.folder / shard.name).stat() for shard in self.plan.shards]
        except OSError:
            return False
        return all(
            os.path.samestat(now, then) and now.st_size == shard.size and mapped[: len(shard.head)] == shard.head
            for now, then, (shard, mapped) in zip(found, self._opened, self._maps, strict=True)
        )

    def copy_from(self, other: "TensorFolder") -> None:
        """Copy all weights from a folder of the same plan."""
        assert self.plan == other.plan
        for (shard, mine), (_, theirs) in zip(self._maps, other._maps, strict=True):
            source, target = (np.frombuffer(m, np.uint8, offset=len(shard.head)) for m in (theirs, mine))
            np.copyto(target, source)

    def flush(self) -> None:
        """Return once every weight is on the disk. Raises: StoreError."""
        for shard, mapped in self._maps:
            with writing(self.folder / shard.name):
                mapped.flush()


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Raise errors of the disk as StoreError."""
    try:
        yield path
    except OSError as e:
        raise StoreError(f"cannot write {path}: {e.strerror or e}", key=str(path)) from e


@contextmanager
def reading_from(path: Path) -> Iterator[None]:
    """The same for reading: NotFoundError if the file does not exist."""
    try:
        yield
    except FileNotFoundError as e:
        raise NotFoundError(f"{e.filename or path} does not exist", key=str(path)) from e
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror or e}", key=str(path)) from e
