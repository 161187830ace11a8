"""The tensors of a worker that are derived from the weights of a run: a transaction updates them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from pulsesync.core.types import Sum
from pulsesync.errors import VerificationError
from pulsesync.quantized.changes import SIGNED, FlatChanges, TileIndex
from pulsesync.quantized.groups import GroupScales, QuantizedGroups
from pulsesync.quantized.recipes import Recipe
from pulsesync.quantized.targets import Targets
from pulsesync.run.follower import attach
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.backend import Delta, Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.weights import Snapshot, WeightState


@dataclass(frozen=True)
class PreparedWeights:
    """A prepared update of the worker's tensors to the weights of the run: nothing is written yet."""

    known: GroupScales  # of the groups afterwards
    transition: Transition | None  # None: all tensors are written completely
    changed: int  # numbers to be written
    requantized: int
    rescaled: int


class DerivedWeights:
    """Tensors that are quantised from the weights of a run, or copied. `plain` is the state of those in `mirror`."""

    def __init__(self, weights: Any, plain: WeightState, mirror: Mapping[str, torch.Tensor], recipe: Recipe) -> None:
        self.plain = plain
        self._targets = Targets.match(weights, plain.layout, recipe)
        self.state = attach(weights, self._targets.layout, None)
        self._where = next(iter(self._targets.tensors.values())).device
        self._mirror = [mirror[spec.name].view(-1) for spec in plain.layout.tensors]
        self._groups = QuantizedGroups(self._targets, recipe, len(self._mirror), self._where)
        self._tiles = TileIndex(plain.layout, self._where)
        self._made_from: Snapshot | None = None  # the weights from which the tensors were derived; None: not known
        self._known: GroupScales | None = None

    @property
    def is_made(self) -> bool:
        """Whether the tensors are derived from weights of the run."""
        return self._made_from is not None

    def forget(self) -> None:
        """Something else has written to the tensors: all of them must be quantised again."""
        self._made_from = None

    # Preparing

    def prepare(self) -> PreparedWeights:
        """Find the changes of the tensors; changes nothing."""
        changes = self._changed_weights()
        if changes is None:
            return self._prepare_whole()
        assert self._known is not None
        found = self._groups.follow(changes, self._weights, self._known)
        if found is None:
            return self._prepare_whole()
        transition = self._transition(found.changes)
        return PreparedWeights(found.known, transition, transition.changed, found.requantized, found.rescaled)

    def _prepare_whole(self) -> PreparedWeights:
        known = self._groups.count(self._weights)
        changed = sum(flat.numel() for flat in self._targets.tensors.values())
        return PreparedWeights(known, None, changed, self._groups.size, self._targets.groups)

    def _changed_weights(self) -> list[FlatChanges] | None:
        """The changes of the weights since the tensors were derived; None if that is not known.

        A snapshot has the changes of commits since it was taken. An anchor is not a commit, so the digests are
        compared.
        """
        if self._made_from is None:
            return None
        back, changes = self._made_from, _changes_of(self.plain)
        if _sums_after(self.plain, back.changes) != back.sums:
            return None
        listed = (one.to(self._where).inverse() for one in changes.list_changes(back.changes))
        return [self._tiles.by_tensor(one) for one in listed]

    def _transition(self, some: Sequence[FlatChanges]) -> Transition:
        state = self.state
        changes = _changes_of(state).make_changes(state, some)
        return Transition(changes, _sums_after(state, changes), state.history, state.backend.count_changed(changes))

    def _weights(self, number: int) -> torch.Tensor:
        """A tensor of the run as flat integers, on the device of the worker's tensors."""
        flat = self._mirror[number]
        return flat.view(SIGNED[flat.element_size()]).to(self._where)

    # Writing

    def commit(self, prepared: PreparedWeights) -> None:
        """Write what was prepared. Raises: VerificationError, if everything was to be written and that failed."""
        if prepared.transition is not None:
            self.state.commit(prepared.transition)
        else:
            self._made_from = None
            try:
                AnchorLoader(self.state).rewrite(lambda: self._write_all(prepared.known))
            except Exception as e:
                raise VerificationError(
                    f"quantising all weights failed halfway ({e}): they are between two versions; do not use them "
                    "until a sync succeeds",
                    torn=True,
                ) from e
        self._made_from, self._known = self.plain.snapshot(), prepared.known

    # Tensors that were made in this mode can only be written in it; others can be written in it, too.
    @torch.inference_mode()
    def _write_all(self, known: GroupScales) -> None:
        tensors = self._targets.tensors
        for target in self._targets.copied:
            flat = tensors[target.name]
            flat.view(SIGNED[flat.element_size()]).copy_(self._weights(target.source))
        for target in self._targets.quantized:
            tensors[target.name].copy_(self._groups.quantized(target, self._weights, known).view(-1))
        for number, scales in self._groups.scales_by_tensor(known).items():
            tensors[self._targets.layout.tensors[number].name].copy_(scales)


def _sums_after(state: WeightState, changes: Delta) -> dict[int, Sum]:
    """The digests of tiles after some changes."""
    by = state.backend.count_digest_changes(changes)
    return {ordinal: total + by.get(ordinal, Sum(0, 0)) for ordinal, total in state.sums.items()}


def _changes_of(state: WeightState) -> Any:
    """The functions for changes of a state: those for host memory, or for a GPU."""
    where = "host" if isinstance(state.backend, HostBackend) else "device"
    return import_module(f"pulsesync.quantized.{where}_changes")
