"""Fragments: a model or a piece of one, its parameters as one FP32 vector on their device, and the state of rounds."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pulsesync import device
from pulsesync.core.types import TensorSpec
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.loco.gate import ReadPiece, SentUpdate, SparseVector, Update
from pulsesync.loco.outer_step import OuterRule, TrainerUpdate
from pulsesync.loco.shared import SharedState
from pulsesync.loco.vectors import Vector, VectorOps, vectors_at

MOST_ATTEMPTS = 8  # at a round, each with a new update: more would fill the memory
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # of a tensor: address, shape and strides


def place_of(tensor: Any) -> Place | None:
    """Where the values of a tensor lie; None if it is not a tensor, such as an extra state of a module."""
    if not hasattr(tensor, "data_ptr"):
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


class FragmentTensors:
    """The parameters of a fragment as one FP32 vector."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        import torch

        for name, tensor in parameters.items():
            if tensor.dtype != torch.float32:
                raise StateError(
                    f"parameter {name!r} is {tensor.dtype}: trainers average FP32 master weights. Keep the model in "
                    "FP32 and compute in BF16 with autocast, or pass the masters as a mapping of names to tensors",
                    tensor=name,
                )
        self._tensors = dict(parameters)
        self.vectors = _vectors_of(self._tensors)
        self._devices = {name: tensor.device for name, tensor in parameters.items()}
        specs = [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in parameters.items()]
        self.layout = layouts.make(specs).id
        self._begins = [place.start for _, _, place in self._places()]
        self.size = sum(spec.size for spec in specs)

    def _places(self) -> Iterator[tuple[str, Any, slice]]:
        at = 0
        for name, tensor in self._tensors.items():
            yield name, tensor, slice(at, at + tensor.numel())
            at += tensor.numel()

    @property
    def is_contiguous(self) -> bool:
        """Whether pieces can be read without copying whole tensors."""
        return all(tensor.is_contiguous() for tensor in self._tensors.values())

    def check_place(self) -> None:
        """Raises: StateError, if a parameter has moved to another device."""
        for name, tensor in self._tensors.items():
            if tensor.device != self._devices[name]:
                raise StateError(
                    f"parameter {name!r} was on {self._devices[name]} and is now on {tensor.device}: move the model "
                    "before the trainer is made",
                    tensor=name,
                )

    def read(self, gradients: bool = False) -> Vector:
        """A copy. Raises: StateError, if a parameter has moved to another device."""
        self.check_place()
        v, out = self.vectors, self.vectors.empty(self.size)

        def copy(item: tuple[str, Any, slice]) -> None:
            _, tensor, place = item
            source = tensor.grad if gradients else tensor
            out[place] = 0 if source is None else v.flat(source)

        v.kernels.spread(copy, (item for item in self._places() if item[1].numel()))
        return out

    def read_piece(self, here: slice) -> Vector:
        """Some of the current weights, read-only. A tensor that is not contiguous is copied whole for every piece."""
        return self.vectors.join([self.vectors.flat(tensor)[part] for tensor, part in self._parts(here)])

    def _parts(self, here: slice) -> Iterator[tuple[Any, slice]]:
        """The tensors that contain these entries, and the range in each."""
        tensors, at = list(self._tensors.values()), here.start
        number = bisect_right(self._begins, at) - 1
        while at < here.stop:
            begin, size = self._begins[number], tensors[number].numel()
            if size:
                yield tensors[number], slice(at - begin, min(here.stop - begin, size))
            at, number = begin + size, number + 1

    def write(self, read: ReadPiece) -> None:
        """Replace the weights by the result of `read`, piece by piece. Raises: as `read`."""
        self.check_place()
        v = self.vectors

        def write(here: slice) -> None:
            v.kernels.assign([tensor.detach().view(-1)[part] for tensor, part in self._parts(here)], read(here))

        def write_tensor(item: tuple[str, Any, slice]) -> None:
            _, tensor, place = item
            tensor.detach().copy_(v.tensor(read(place)).view(tensor.shape))

        if self.is_contiguous:
            v.kernels.each(write, self.size)
        else:
            v.kernels.spread(write_tensor, (item for item in self._places() if item[1].numel()))

    def views(self, values: Vector) -> dict[Place | None, Any]:
        """A vector of this fragment as tensors, by the addresses of their parameters."""
        values = self.vectors.kernels.hand_out(values)
        return {
            place_of(tensor): self.vectors.tensor(values[place]).view(tensor.shape)
            for _, tensor, place in self._places()
            if tensor.numel()
        }

    def write_gradients(self, values: Vector | None) -> None:
        """Replace the gradients; None removes them, so that an optimizer's step changes nothing."""
        if values is not None:
            values = self.vectors.kernels.hand_out(values)
        for _, tensor, place in self._places():
            if values is None:
                tensor.grad = None
                continue
            new = self.vectors.tensor(values[place]).view(tensor.shape)
            if tensor.grad is None:
                tensor.grad = new.to(tensor.device, copy=True)
            else:
                tensor.grad.copy_(new)

    def vector(self, saved: Any) -> Vector:
        """A saved vector of this fragment, copied. Raises: StateError, if it does not fit."""
        values = np.array(saved.cpu().numpy(), np.float32)
        if values.shape != (self.size,):
            raise StateError(f"the saved state must have the {self.size} weights of the fragment; it has {values.size}")
        return self.vectors.to_backend(values)

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors.values()]

    def name_of(self, entry: int) -> str:
        return next(name for name, _, place in self._places() if entry < place.stop)


def _vectors_of(tensors: Mapping[str, Any]) -> VectorOps:
    """The backend for the device of all tensors. Raises: StateError: there are several, or one is no GPU."""
    where = device.find(tensors)
    if where is not None:
        for name, tensor in tensors.items():
            if tensor.numel() and tensor.device != where:
                there = "in host memory" if tensor.device.type == "cpu" else f"on {tensor.device}"
                raise StateError(
                    f"expected all parameters of a fragment on one device, but found {name!r} {there} and others on "
                    f"{where}: make a fragment of the parameters of each device, [{{name: parameter, ...}}, ...], or "
                    "move them to one device",
                    tensor=name,
                )
    return vectors_at(where)


class Commit(NamedTuple):
    """What to do after a round that contains this trainer's update: all of it, even if something fails in between."""

    update: TrainerUpdate
    taken: SparseVector | None
    shared: SharedState
    blend: float  # the share of this trainer's own weights that is kept


@dataclass
class PendingUpdates:
    """The updates that a trainer has sent since its last round, which may contain one although it raised an error."""

    by_payload: dict[str, SentUpdate] = field(default_factory=dict)
    attempts: int = 0  # with new updates, since the round began or steps were discarded

    def choose(self, part: SentUpdate) -> SentUpdate:
        """The update to send: this one, or after many attempts the last again; later progress is for the next round."""
        if self.attempts < MOST_ATTEMPTS:
            return part
        return replace(next(reversed(self.by_payload.values())), largest=part.largest)

    def add(self, payload: str, part: SentUpdate) -> None:
        self.attempts += payload not in self.by_payload
        self.by_payload.pop(payload, None)  # so that it becomes the last entry
        self.by_payload[payload] = part

    def sent(self, payload: str, read: SparseVector | None) -> SparseVector | None:
        """The content of a payload: as it was sent or, if the trainer sent it before a restart, as it was read."""
        return self.by_payload[payload].sent if payload in self.by_payload else read


@dataclass(eq=False, repr=False)
class Fragment:
    """A fragment's tensors, the state that all trainers share, this trainer's own state, and its unfinished round.

    The shared state is replaced; residual and momentum, which no other object refers to, are written in place.
    """

    index: int
    tensors: FragmentTensors
    rule: OuterRule
    shared: SharedState
    residual: Vector
    momentum: Vector | None  # None where the outer momentum is shared
    new: bool = True  # whether this trainer has no state of its own: it has sent no update yet, or was cleared
    pending: PendingUpdates = field(default_factory=PendingUpdates)
    uncommitted: Commit | None = None  # unfinished work of the last round: committing an update,
    unwritten: ReadPiece | None = None  # and writing these weights

    @classmethod
    def of(cls, index: int, tensors: FragmentTensors, rule: OuterRule, shared: SharedState | None = None) -> "Fragment":
        """A fragment without a state of its own, at a shared state; if not given, before the first round."""
        v, size = tensors.vectors, tensors.size
        with v.kernels.in_own_stream():
            shared = shared or SharedState(tensors.layout, tensors.read(), rule.first_trend(size, v))
            return cls(index, tensors, rule, shared, v.zeros(size), v.zeros(size) if rule.own_momentum else None)

    def clear(self) -> None:
        """Clear this trainer's own state."""
        self.new = True
        for own in (self.residual, self.momentum):
            if own is not None:
                own[:] = 0

    def start(self) -> ReadPiece:
        """The weights at which this trainer begins its current round."""
        return lambda here: self.rule.start(self.shared.theta[here], self.residual[here])

    def begin_round(self, shared: SharedState, weights: ReadPiece | None = None) -> None:
        """Begin a round at shared weights; the model is to get the given weights, or those at which it begins."""
        self.shared, self.pending = shared, PendingUpdates()
        self.unwritten = weights or self.start()

    def update(self, snapshot: bool = False) -> TrainerUpdate:
        """The current update of this trainer; of a snapshot of its weights if training continues meanwhile."""
        tensors = self.tensors
        with in_own_streams([self]):
            local = tensors.read_piece if tensors.is_contiguous and not snapshot else tensors.read().__getitem__
        return TrainerUpdate(self.rule, self.shared.theta, self.residual, self.momentum, local)

    def first_beyond(self, update: Update, limit: np.float32) -> int | None:
        """The first entry of an update whose magnitude is not within a limit, if there is one."""
        v = self.tensors.vectors
        for begin in range(0, update.size, v.kernels.chunk):
            here = slice(begin, min(begin + v.kernels.chunk, update.size))
            if (found := v.first_beyond(update.read(here), limit)) is not None:
                return begin + found
        return None


@contextmanager
def in_own_streams(fragments: Iterable[Fragment]) -> Iterator[None]:
    """Compute on the devices of fragments, in order with what the caller launches there before and after it.

    On a GPU the work inside is in a stream of its own, after the caller's; its end is waited for. These contexts may be
    nested.
    """
    with ExitStack() as stack:
        for v in dict.fromkeys(fragment.tensors.vectors for fragment in fragments):
            stack.enter_context(v.kernels.in_own_stream())
        yield


def named_tensors(model: Any) -> dict[str, Any]:
    """The tensors of a model, masters, or several of either, by name. Raises: StateError: a name is in two pieces."""
    if hasattr(model, "state_dict"):
        return dict(model.state_dict(keep_vars=True))
    if isinstance(model, Mapping):
        return dict(model)
    out: dict[str, Any] = {}
    for piece in model:
        found = named_tensors(piece)
        if same := out.keys() & found.keys():
            raise StateError(
                f"two fragments have a tensor named {min(same)!r}: pass the whole model, so that names are unique"
            )
        out.update(found)
    return out


def fragments_of(model: Any) -> list[FragmentTensors]:
    """One for a module or a mapping of masters, or one for each of several."""
    pieces = model if isinstance(model, Sequence) and not hasattr(model, "named_parameters") else [model]
    found = [_parameters_of(piece) for piece in pieces]
    for name, tensor in (item for tensors in found for item in tensors.items()):
        if tensor.numel() and not tensor.data_ptr():
            raise StateError(
                f"parameter {name!r} is a {type(tensor).__name__}, not a plain tensor. Pass the local tensors of "
                "this process as a mapping of names to tensors",
                tensor=name,
            )
    everyone = [tensor.data_ptr() for tensors in found for tensor in tensors.values() if tensor.numel()]
    if len(set(everyone)) != len(everyone):
        raise StateError("a parameter is in two fragments, or twice in one; each must be in one fragment, once")
    if not all(found):
        raise StateError("a fragment must have parameters that require gradients; one has none")
    return [FragmentTensors(tensors) for tensors in found]


def _parameters_of(piece: Any) -> dict[str, Any]:
    if isinstance(piece, Mapping):
        return dict(piece)
    return {name: tensor for name, tensor in piece.named_parameters() if tensor.requires_grad}


def check_covered(optimizer: Any, fragments: Sequence[FragmentTensors]) -> None:
    """Raises: StateError, if the optimizer trains parameters that no fragment has: replicas would diverge in them."""
    known = {address for fragment in fragments for address in fragment.addresses()}
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
    if missing := [tuple(p.shape) for p in moved if p.data_ptr() not in known]:
        raise StateError(
            f"the inner optimizer trains {len(missing)} parameters that no fragment has, such as {missing[0]}; add "
            "them to a fragment, or take them out of the optimizer"
        )
