"""What other systems send for the same change: the formats that our patches are compared with, in one interface.

They are written from the formats' descriptions, except basilica-sdk, whose own package is called. All of them are
lossless. They take states as dicts of name -> uint16 array (BF16 bit patterns, C-contiguous), and may assume that both
states have the same tensors. They do not check the bytes that they read: they are for benchmarks, not for production.

    patch = PulseCoo().encode(old, new)
    PulseCoo().apply_(state, patch)         # state was old and is now new

`check` makes sure that each of them reproduces states with unusual shapes and values bit for bit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from pulsesync.testing import mutate, random_bits

Bits = npt.NDArray[np.uint16]
State = Mapping[str, Bits]
Ints = npt.NDArray[np.integer[Any]]


class Baseline(Protocol):
    """A format that describes a change of weights."""

    name: str

    def encode(self, old: State, new: State) -> bytes:
        """The bytes that take old to new; neither is modified."""
        ...

    def apply_(self, state: State, data: bytes) -> None:
        """Turn state, which must be what encode was given as old, into new, in place."""
        ...


class IndexValue:
    """What SparseRL-Sync's code sends: a 4-byte position and the new value for each change, not compressed."""

    name = "index int32 + value"

    def encode(self, old: State, new: State) -> bytes:
        counts, columns = {}, []
        for key in old:
            positions = changed(old[key], new[key])
            if len(positions):
                counts[key] = len(positions)
                columns += [positions.astype("<i4").tobytes(), new[key].reshape(-1)[positions].tobytes()]
        return with_header(counts, columns)

    def apply_(self, state: State, data: bytes) -> None:
        counts, at = split_header(data)
        for key, count in counts.items():
            positions = np.frombuffer(data, "<i4", count, at)
            values = np.frombuffer(data, "<u2", count, at + 4 * count)
            flat_view(state[key])[positions] = values
            at += 6 * count


class XorZstd:
    """What several frameworks send: old XOR new, all of it, left to zstd; one frame for each tensor."""

    name = "XOR + zstd-1"

    def encode(self, old: State, new: State) -> bytes:
        compressor = zstandard.ZstdCompressor(level=1)
        frames = {key: compressor.compress(np.ascontiguousarray(old[key] ^ new[key]).data) for key in old}
        return with_header({key: len(frame) for key, frame in frames.items()}, list(frames.values()))

    def apply_(self, state: State, data: bytes) -> None:
        sizes, at = split_header(data)
        decompressor = zstandard.ZstdDecompressor()
        for key, size in sizes.items():
            flips = np.frombuffer(decompressor.decompress(memoryview(data)[at : at + size]), "<u2")
            flat = flat_view(state[key])
            np.bitwise_xor(flat, flips, out=flat)
            at += size


class PulseCoo:
    """PULSE as published: rows and columns of the changes as narrow differences, new values, one zstd-1 frame.

    A tensor counts as a matrix of shape[0] rows. A row is stored as the distance from the row of the change before; a
    column likewise, but from the left edge where a new row begins. Their reader goes row by row in Python; this one
    does the same with whole arrays, so it is faster than PULSE's own code.
    """

    name = "PULSE COO + zstd-1"

    def encode(self, old: State, new: State) -> bytes:
        tensors, columns, offset = [], [], 0
        for key in old:
            positions = changed(old[key], new[key])
            if not len(positions):
                continue
            row, column = np.divmod(positions, row_length(new[key].shape))
            row_steps = np.diff(row, prepend=0)
            column_steps = np.diff(column, prepend=0)
            new_row = row_steps > 0
            column_steps[new_row] = column[new_row]
            rows = narrow(row_steps, ("u1", "<u2", "<i4"))
            cols = narrow(column_steps, ("<u2", "<i4"))
            values = new[key].reshape(-1)[positions]
            indices_size = rows.nbytes + cols.nbytes
            tensors.append(
                {
                    "name": key,
                    "shape": new[key].shape,
                    "num_nonzero": len(positions),
                    "value_dtype": "bfloat16",
                    "row_dtype": rows.dtype.name,
                    "col_dtype": cols.dtype.name,
                    "indices_offset": offset,
                    "indices_size": indices_size,
                    "rows_size": rows.nbytes,
                    "cols_size": cols.nbytes,
                    "values_offset": offset + indices_size,
                    "values_size": values.nbytes,
                }
            )
            columns += [rows.tobytes(), cols.tobytes(), values.tobytes()]
            offset += indices_size + values.nbytes
        plain = with_header({"version": 31, "tensors": tensors}, columns)
        return zstandard.ZstdCompressor(level=1).compress(plain)

    def apply_(self, state: State, data: bytes) -> None:
        plain = zstandard.ZstdDecompressor().decompress(data)
        header, start = split_header(plain)
        for tensor in header["tensors"]:
            count, at = tensor["num_nonzero"], start + tensor["indices_offset"]
            row_steps = np.frombuffer(plain, tensor["row_dtype"], count, at).astype(np.int64)
            column_steps = np.frombuffer(plain, tensor["col_dtype"], count, at + tensor["rows_size"]).astype(np.int64)
            values = np.frombuffer(plain, "<u2", count, start + tensor["values_offset"])
            # A running sum over all columns, less what it had reached where each change's row began.
            begins = np.flatnonzero(row_steps)
            if len(begins) == 0 or begins[0] != 0:
                begins = np.concatenate(([0], begins))
            sums = np.cumsum(column_steps)
            reached = np.repeat((sums - column_steps)[begins], np.diff(begins, append=count))
            positions = np.cumsum(row_steps) * row_length(tensor["shape"]) + sums - reached
            flat_view(state[tensor["name"]])[positions] = values


class Basilica:
    """basilica-sdk's `_pulse` codec: version 1 (16-bit gaps), 2 (Rice-coded gaps), 3 (ranks by old exponent).

    Its encode and apply also take an xxh3 digest of every tensor, which counts in the
    measured time although the format does not need it.
    """

    def __init__(self, version: int, workers: int = 2) -> None:
        try:
            import torch
            from basilica._pulse import codec
        except ImportError as error:
            raise ImportError(
                "this baseline needs basilica-sdk, torch and xxhash: pip install basilica-sdk==0.36.8 torch xxhash"
            ) from error
        self.name = f"basilica-sdk v{version}"
        self._version = version
        self._workers = workers
        self._codec = codec
        self._torch = torch

    def encode(self, old: State, new: State) -> bytes:
        model = self._codec.ModelMeta(
            id="baseline", digest="sha256:" + "0" * 64, param_count=sum(bits.size for bits in old.values())
        )
        patch, _ = self._snapshot(old).encode_step(
            self._tensors(new).items(),
            step=1,
            base_step=0,
            model=model,
            workers=self._workers,
            format_version=self._version,
        )
        return bytes(patch)

    def apply_(self, state: State, data: bytes) -> None:
        self._snapshot(state).apply_patch(self._codec.parse_patch(data))

    def _tensors(self, state: State) -> dict[str, Any]:
        """The state as BF16 tensors over the same memory."""
        return {
            key: self._torch.from_numpy(bits.view(np.int16)).view(self._torch.bfloat16) for key, bits in state.items()
        }

    def _snapshot(self, state: State) -> Any:
        # The constructor would copy every tensor. A real user keeps one snapshot from step to step and does not pay for
        # that copy, so we bypass the constructor and set the tensors directly. It also makes apply_patch write into the
        # given state itself.
        snapshot = self._codec.Snapshot({})
        snapshot._tensors = dict(sorted(self._tensors(state).items()))
        return snapshot


def baselines() -> list[Baseline]:
    """Every baseline that can run here; the three of basilica-sdk are included only where it is installed."""
    found: list[Baseline] = [IndexValue(), PulseCoo(), XorZstd()]
    try:
        found += [Basilica(version) for version in (1, 2, 3)]
    except ImportError:
        print("basilica-sdk v1, v2, v3 left out: pip install basilica-sdk==0.36.8 torch xxhash\n")
    return found


def changed(old: Bits, new: Bits) -> npt.NDArray[np.int64]:
    """Flat positions at which two tensors differ, ascending."""
    return np.flatnonzero(old.reshape(-1) != new.reshape(-1))


def flat_view(bits: Bits) -> Bits:
    assert bits.flags.c_contiguous, "a copy would be changed instead"
    return bits.reshape(-1)


def row_length(shape: tuple[int, ...] | list[int]) -> int:
    return int(np.prod(shape[1:], dtype=np.int64))


def narrow(numbers: Ints, dtypes: tuple[str, ...]) -> Ints:
    """The numbers, in the first of the dtypes that can represent all of them."""
    return numbers.astype(next(dtype for dtype in dtypes if numbers.max() <= np.iinfo(dtype).max))


def with_header(header: dict[str, Any], columns: list[bytes]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *columns])


def split_header(data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the bytes after it begin."""
    (size,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + size]), 4 + size


def check(some: list[Baseline]) -> None:
    """Round-trip states of awkward shapes, densities and bit patterns. Raises: AssertionError."""
    rng = np.random.default_rng(0)
    shapes = {"scalar": (), "row": (999,), "wide": (2, 300000), "tall": (300000, 2), "cube": (5, 6, 7), "none": (0,)}
    for density in (0.0, 0.00001, 0.001, 0.5, 1.0):  # the second leaves gaps beyond 16 bits
        old = {key: random_bits(rng, np.uint16, shape) for key, shape in shapes.items()}
        new = {key: mutate(rng, bits, density) for key, bits in old.items()}
        for baseline in some:
            before, state = ({key: bits.copy() for key, bits in old.items()} for _ in range(2))
            baseline.apply_(state, baseline.encode(before, new))
            for key in old:
                assert np.array_equal(state[key], new[key]), (baseline.name, density, key)
                assert np.array_equal(before[key], old[key]), (baseline.name, density, key)
