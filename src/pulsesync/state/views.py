"""From numpy arrays, torch tensors and modules to bits and back, without a copy where possible.

Arrays of bfloat16 and float8 come from ml_dtypes, or from torch. A tensor that appears under two names in the same
memory is a tie: one of them is canonical, the other an alias.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pulsesync.core.types import DTYPES, Bits, TensorSpec, Tile
from pulsesync.errors import LimitError, StateError
from pulsesync.format.layout import Layout
from pulsesync.state.modules import tensors_of

if TYPE_CHECKING:
    import torch

Cast: TypeAlias = "str | torch.dtype | np.dtype[Any] | type[Any]"  # a dtype to which FP32 is cast

CASTS = {"BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_NUMPY_NAMES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (32, 64)},
    **{name: label for label, name in CASTS.items()},
}


@dataclass(frozen=True)
class BitView:
    """A tensor as bits: flat, contiguous, and where `shared` in the tensor's own memory."""

    spec: TensorSpec
    flat: Bits
    shared: bool
    of_torch: bool = False

    @property
    def address(self) -> int:
        """The address of the weights; 0 if there are none."""
        return self.flat.ctypes.data if self.flat.size else 0


def view_bits(source: Any) -> tuple[dict[str, BitView], dict[str, str]]:
    """View a module, a state dict or a mapping of arrays as bits; return canonical tensors, and aliases by name.

    Raises:
        StateError: something that is not a tensor, of a dtype that the format does not support, or not in host memory.
    """
    views: dict[str, BitView] = {}
    ties: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in named(source):
        array = _as_numpy(name, tensor)
        view = _view(name, array, of_torch=not isinstance(tensor, np.ndarray))
        place = (array.__array_interface__["data"][0], view.spec.dtype, view.spec.shape, array.strides)
        if view.spec.size and place in seen:
            ties[name] = seen[place]
            continue
        seen[place] = name
        views[name] = view
    return views, ties


def mapping_of(source: Any) -> Mapping[str, Any]:
    """The tensors of a module, a state dict or a mapping, by name; those of a module may be its parameters themselves.

    Raises: StateError.
    """
    if isinstance(source, Mapping):
        return source
    if (found := tensors_of(source)) is not None:
        return found
    if not hasattr(source, "state_dict"):
        raise StateError(f"expected a module, a state dict or a mapping of arrays; got {type(source).__name__}")
    tensors: Mapping[str, Any] = source.state_dict()
    return tensors


def named(source: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a module, a state dict or a mapping, in the order of the names. Raises: StateError."""
    source = mapping_of(source)
    for name in sorted(source, key=_encoded):
        yield name, source[name]


class SourceMarks:
    """Addresses and dtypes of the tensors of a source, to recognize the same source at half a µs a tensor.

    Viewing a tensor as bits takes eighty times as long. A numpy array is recognized by identity, without being kept
    alive, and by shape and dtype, which can be assigned; a torch tensor by address, because every `state_dict` makes
    new tensors.
    """

    def __init__(self, marks: list[list[Any]], arrays: Sequence["weakref.ref[Any]"]) -> None:
        self._marks, self._arrays = marks, arrays

    @classmethod
    def of(cls, source: Any) -> "SourceMarks | None":
        """None: something in the source is not a plain, contiguous tensor, and must be viewed each time."""
        tensors = mapping_of(source)
        marks = _marks_of(tensors)
        arrays = [weakref.ref(tensor) for tensor in tensors.values() if type(tensor) is np.ndarray]
        return None if marks is None else cls(marks, arrays)

    def fit(self, source: Any) -> bool:
        """Whether a source has the same memory as the one of these marks."""
        return all(array() is not None for array in self._arrays) and _marks_of(mapping_of(source)) == self._marks


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


def _marks_of(tensors: Mapping[str, Any]) -> list[list[Any]] | None:
    """Names, dtypes, shapes, and addresses or identities of tensors, if all are plain and contiguous.

    Loops in C: in Python, they would take twice as long.
    """
    every = list(tensors.values())
    arrays = [tensor for tensor in every if type(tensor) is np.ndarray]
    others = [tensor for tensor in every if type(tensor) is not np.ndarray] if arrays else every
    addresses: list[int] = []  # which identify the device as well
    if others:
        torch = sys.modules.get("torch")
        if torch is None or not {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, others)):
            return None
        kind = torch.Tensor
        try:
            if not all(map(kind.is_contiguous, others)) or any(map(kind.is_neg, others)):
                return None
            addresses += map(kind.data_ptr, others)
        except RuntimeError:  # a tensor that is not strided has no address
            return None
    if not all(array.flags.c_contiguous for array in arrays):
        return None
    return [list(tensors), list(map(_DTYPE, every)), list(map(_SHAPE, every)), list(map(id, arrays)), addresses]


def dtype_name(name: str, tensor: Any) -> str:
    """The format's name for the dtype of a torch tensor. Raises: StateError, if it has none."""
    dtype = _NUMPY_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise StateError(
            f"tensor {name!r} has dtype {tensor.dtype}, which the format does not support: convert it, or leave it out",
            tensor=name,
        )
    return dtype


NOT_WRITABLE = (
    "is not contiguous, or read-only: it cannot be written in place. parameter.data = parameter.data.contiguous() "
    "makes a parameter contiguous; of a read-only array, pass a copy"
)


def other_names(missing: Sequence[str], extra: Sequence[str], hint: str = "") -> StateError:
    """Return the error for tensors whose names differ from the run's.

    missing: tensors of the run without a local one; extra: local tensors that are not in the run; hint: what else
    to do.
    """
    found = [f"the run has {_list_names(missing)}, and this model does not"] if missing else []
    if extra:
        found.append(f"this model has {_list_names(extra)}, and the run does not")
    prefix, other = _find_prefix(missing, extra), _find_prefix(extra, missing)
    if prefix:
        advice = f"the local names begin with {prefix!r}, which those of the run lack: pass the tensors without it"
    elif other:
        advice = f"the names in the run begin with {other!r}, which the local ones lack: pass the tensors with it"
    else:
        advice = f"the weights are unchanged. Pass tensors with the names that the trainer publishes{hint}"
    return StateError(f"{'; '.join(found)}. {advice[0].upper()}{advice[1:]}", tensor=(*missing, *extra)[0])


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
    return f"tensor {shown}" if len(names) == 1 else f"{len(names)} tensors ({shown})"


def _find_prefix(short: Sequence[str], long: Sequence[str]) -> str | None:
    """Return the prefix with which the short names are long ones, such as 'module.'; None if there is none."""
    names = set(long)
    prefixes = (name.removesuffix(short[0]) for name in long if name.endswith(f".{short[0]}")) if short else ()
    return next((prefix for prefix in prefixes if all(prefix + name in names for name in short)), None)


def torch_dtype(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype_in_torch(dtype))


def dtype_in_torch(dtype: str) -> str:
    """The name in torch of the dtype with this name in the format."""
    return next(name for name, label in _NUMPY_NAMES.items() if label == dtype)


@dataclass(frozen=True)
class HostSource:
    """A source as it is published: FP32 master weights in the dtype that inference uses, all else unchanged.

    Weights are read and cast block by block, so that no second copy is ever made. The cast is that of the library that
    owns the tensor, so that the result is what saving the model in that dtype would yield: numpy and torch both round
    to the nearest, ties to even, but they write NaN differently.
    """

    views: Mapping[str, BitView]
    dtypes: Mapping[str, str]  # name -> dtype, for tensors that are cast
    tensors: Mapping[str, Any] = field(default_factory=dict)  # as they are in the source, if all are contiguous

    def without_weights(self) -> "HostSource":
        """The same without references to the memory of the weights."""
        nothing: Bits = np.empty(0, np.uint8)
        return replace(self, views={name: replace(view, flat=nothing) for name, view in self.views.items()})

    def again(self, source: Any) -> "HostSource":
        """The same with the weights of a source that has the marks of this one's source."""
        tensors = mapping_of(source)
        return HostSource(_LaterViews(self.views, tensors), self.dtypes, tensors)

    def spec(self, name: str) -> TensorSpec:
        spec = self.views[name].spec
        return replace(spec, dtype=self.dtypes[name]) if name in self.dtypes else spec

    def block(self, tile: Tile, number: int) -> Bits:
        return self.read(tile, *tile.block_range(number))

    def bundle(self, pieces: Sequence[Tile], whole: Sequence[str] | None) -> Bits:
        """The weights of a bundle, given its pieces in these tensors: gathered and then cast, if all are cast alike.

        whole: the names of their tensors, where each is all of its tensor.
        """
        casts = {self.dtypes.get(name) for name in whole or ()} if self.dtypes else {None}
        tensors = [self.tensors[name] for name in whole or ()] if self.tensors else []
        of_torch = {not issubclass(kind, np.ndarray) for kind in set(map(type, tensors))}
        if len(casts) > 1 or len(of_torch) != 1:  # also where there are no whole tensors
            return np.concatenate([self.block(piece, 0) for piece in pieces])
        bits, dtype = _joined(tensors, True in of_torch), casts.pop()
        return bits if dtype is None else _cast(bits, dtype, True in of_torch)

    def read(self, tile: Tile, begin: int, end: int) -> Bits:
        """Weights begin..end of a tile, in the coordinates of these tensors."""
        view = self.views[tile.tensor.name]
        bits = tile.read(view.flat, begin, end)
        dtype = self.dtypes.get(tile.tensor.name)
        return bits if dtype is None else _cast(bits, dtype, view.of_torch)


def read_published(source: Any, cast: Mapping[str, str]) -> tuple[HostSource, Mapping[str, str]]:
    """A source in host memory as it is published, and its ties. Raises: as `view_bits` and `find_casts`."""
    views, ties = view_bits(source)
    return HostSource(views, find_casts((view.spec for view in views.values()), cast)), ties


def find_casts(specs: Iterable[TensorSpec], cast: Mapping[str, str]) -> dict[str, str]:
    """The dtypes to which FP32 tensors are cast, by the first pattern that matches the name.

    Raises: StateError: a pattern asks for another dtype than that of a tensor of 16 bits, which is not cast.
    """
    dtypes = {}
    for spec in specs:
        fits = next((dtype for pattern, dtype in cast.items() if fnmatchcase(spec.name, pattern)), "")
        if fits and spec.dtype == "F32":
            dtypes[spec.name] = fits
        elif fits and spec.dtype in ("BF16", "F16") and spec.dtype != fits:
            raise StateError(
                f"tensor {spec.name!r} is {spec.dtype}, and cast={fits!r} converts FP32 only, so workers would get "
                f"{spec.dtype}: convert the model before it is published, model.to(torch.{CASTS[fits]}), or exclude "
                f"the tensor with cast={{{escape(spec.name)!r}: '', '*': {fits!r}}}",
                tensor=spec.name,
            )
    return dtypes


def read_cast(cast: "Cast | Mapping[str, Cast] | None") -> dict[str, str]:
    """The format's names of the dtypes that `cast=` asks for, by pattern; empty: no cast. Raises: ValueError."""
    given = cast if isinstance(cast, Mapping) else {} if cast is None else {"*": cast}
    return {pattern: _cast_dtype(dtype) for pattern, dtype in given.items()}


def _cast_dtype(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else str(dtype)
    if not isinstance(dtype, str) and not name.startswith("torch."):
        with suppress(TypeError):  # it is not a dtype
            name = np.dtype(dtype).name
    name = name.removeprefix("torch.").lower()
    found = next((label for label, framework in CASTS.items() if name in (label.lower(), framework)), "")
    if name and not found:
        raise ValueError(
            f"cast must be one of {', '.join(map(repr, CASTS))}, a torch dtype such as torch.bfloat16, or such dtypes "
            f"by name pattern; got {dtype!r}"
        )
    return found


def _cast(bits: Bits, dtype: str, of_torch: bool) -> Bits:
    if of_torch:
        import torch

        cast = torch.from_numpy(bits.view(np.float32)).to(torch_dtype(dtype))
        out: Bits = cast.view(getattr(torch, f"uint{8 * DTYPES[dtype].itemsize}")).numpy()
        return out
    with np.errstate(all="ignore"):  # NaN and overflow are values here
        return bits.view(np.float32).astype(_numpy_dtype(CASTS[dtype])).view(DTYPES[dtype].bits)


def new_tensors(specs: Iterable[TensorSpec]) -> dict[str, np.ndarray[Any, Any]]:
    """Zeros in the shapes and dtypes of tensors, as numpy arrays. Raises: LimitError, if there is no memory."""
    return {spec.name: zeros(spec, spec.shape, _numpy_dtype(dtype_in_torch(spec.dtype))) for spec in specs}


def new_torch_tensors(layout: Layout) -> dict[str, Any]:
    """Zeros for all tensors of a run, as torch tensors, tied ones under each of their names."""
    import torch

    own = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in layout.tensors}
    return own | {alias: own[name] for alias, name in layout.ties.items()}


def zeros(spec: TensorSpec, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> np.ndarray[Any, Any]:
    """Memory for a tensor whose size was read from a file. Raises: LimitError, if there is not enough."""
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as e:  # ValueError: more than an array can have on any machine
        size = spec.size * spec.kind.itemsize
        raise LimitError(
            f"tensor {spec.name!r} needs {size} bytes of memory, which this machine does not have: free some, or "
            "use a larger one",
            tensor=spec.name,
            value=size,
        ) from e


def _encoded(name: Any) -> bytes:
    try:
        return bytes(name.encode())
    except (AttributeError, UnicodeEncodeError):
        raise StateError(f"the name of a tensor must be a string of valid Unicode; got {name!r}", tensor=name) from None


def _as_numpy(name: str, tensor: Any) -> np.ndarray[Any, Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.device.type != "cpu":
            raise StateError(
                f"tensor {name!r} is on {tensor.device}; only host memory is supported here: pass a copy, tensor.cpu()",
                tensor=name,
            )
        tensor = tensor.detach()
        dtype_name(name, tensor)
        label = str(tensor.dtype).removeprefix("torch.")
        try:
            bits: np.ndarray[Any, Any] = tensor.view(getattr(torch, f"uint{8 * tensor.element_size()}")).numpy()
        except (RuntimeError, TypeError) as e:  # sparse, lazily negated, or otherwise not plain memory
            raise StateError(
                f"tensor {name!r} is not a plain, dense tensor: {e}. Pass a dense copy of it, or leave it out",
                tensor=name,
            ) from e
        return bits.view(_numpy_dtype(label))
    if not isinstance(tensor, np.ndarray):
        raise StateError(f"{name!r} must be a tensor; got {type(tensor).__name__}: leave it out", tensor=name)
    return tensor


def _numpy_dtype(label: str) -> np.dtype[Any]:
    if label.startswith(("bfloat", "float8")):
        import ml_dtypes

        label = getattr(ml_dtypes, label)
    dtype: np.dtype[Any] = np.dtype(label)
    return dtype


def _joined(tensors: Sequence[Any], of_torch: bool) -> Bits:
    """The bits of tensors of one dtype, each contiguous, one after the other."""
    if of_torch:
        import torch

        with torch.no_grad():
            return _plain_bits(torch.cat([tensor.view(-1) for tensor in tensors]), of_torch)
    flat = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors]
    return _plain_bits(np.concatenate(flat), of_torch)


def _plain_bits(tensor: Any, of_torch: bool) -> Bits:
    """The bits of a contiguous tensor, as a view."""
    if of_torch:
        import torch

        tensor = tensor.detach().view(-1).view(getattr(torch, f"uint{8 * tensor.element_size()}")).numpy()
    flat: Bits = tensor.reshape(-1).view(f"<u{tensor.itemsize}")
    return flat


class _LaterViews(Mapping[str, BitView]):
    """Views of tensors whose metadata is known: made on first access."""

    def __init__(self, known: Mapping[str, BitView], tensors: Mapping[str, Any]) -> None:
        self._known, self._tensors = known, tensors

    def __getitem__(self, name: str) -> BitView:
        known = self._known[name]
        return replace(known, flat=_plain_bits(self._tensors[name], known.of_torch))

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _view(name: str, array: np.ndarray[Any, Any], of_torch: bool) -> BitView:
    dtype = _NUMPY_NAMES.get(_name_of(array.dtype))
    if dtype is None or array.dtype.byteorder == ">":
        raise StateError(
            f"array {name!r} has dtype {array.dtype}, which the format does not support: convert it, or leave it out",
            tensor=name,
        )
    shared = bool(array.flags.c_contiguous and array.flags.writeable)
    flat = np.ascontiguousarray(array).reshape(-1).view(DTYPES[dtype].bits)
    return BitView(TensorSpec(name, dtype, tuple(int(n) for n in array.shape)), flat, shared, of_torch)


@cache
def _name_of(dtype: "np.dtype[Any]") -> str:
    """The name of a dtype, cached because numpy builds it again at every access: 20 µs."""
    return dtype.name
