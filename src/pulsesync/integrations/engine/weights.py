"""The weights of one rank of an engine, as a `Subscriber` can write them: in place, or through a mirror in host memory.

In place, the tensors are views into the engine's own parameters: a sync writes what changed, and nothing else. If the
engine keeps weights in another form (packed, quantised, or of an architecture without a map), a mirror of the
checkpoint in host memory is synced, and the model's own loader loads the tensors that changed: slower, but exact too.
"""

import logging
import re
import weakref
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from pulsesync.errors import StateError
from pulsesync.format.layout import Layout
from pulsesync.integrations.engine.adapter import EngineAdapter
from pulsesync.integrations.families import ModelShape
from pulsesync.integrations.runtime import HEAD, EngineRank, check_loaded, for_subscriber, fused, not_mapped, place
from pulsesync.run.follower import attach
from pulsesync.state.sharding import Placed
from pulsesync.state.slices import Slices
from pulsesync.state.views import CASTS, new_torch_tensors

logger = logging.getLogger(__name__)


def find_weights(engine: EngineAdapter, layout: Layout, fresh: bool) -> "EngineWeights":
    """Return the weights of this rank: in place, or through a mirror if that is not possible, which is logged.

    fresh: the engine still has the weights that it was started with, so the map can be checked against them.
    """
    try:
        return PlacedWeights(engine, layout, fresh)
    except StateError as e:
        logger.warning("The weights cannot be written in place, so a mirror in host memory is used: %s.", e)
        return MirroredWeights(engine, layout)


class PlacedWeights:
    """The engine's own parameters, by the names of the checkpoint. `tensors` and `slices` are for a `Subscriber`.

    Raises: StateError, if they do not match the map, or are not those of the run.
    """

    mode = "in place"

    def __init__(self, engine: EngineAdapter, layout: Layout, fresh: bool) -> None:
        names = {spec.name for spec in layout.tensors} | set(layout.ties)
        self._shape = ModelShape.from_config(engine.hf_config(), lm_head="lm_head.weight" in names)
        _check_names(names, self._shape)
        self._engine, self._rank = engine, engine.rank()
        placed = self._place()
        if not (fresh and _check_placed(engine, placed)) and self._shape.experts:
            raise StateError(
                "the engine has no checkpoint with which the positions of its experts can be checked, and some kernels "
                "rearrange experts"
            )
        attach(self.tensors, layout, self.slices, widen=True)  # raises the errors of a sync before any rank votes

    def _place(self) -> dict[str, Placed]:
        live = self._engine.parameters()
        placed = place(self._shape, self._rank, live)
        self.tensors, self.slices = for_subscriber(placed)
        self._addresses = _addresses(live)
        return placed

    def load(self, names: Collection[str]) -> None:
        """Have the engine compute with the synced weights, at least with those of these tensors."""
        if names:
            self._engine.refresh_packed()

    def refresh(self) -> bool:
        """Inspect the engine again; return whether something else has loaded its weights since the last `load`.

        Changes that a sync with `verify=True` finds by recounting the weights are not searched for here.
        """
        if _addresses(self._engine.parameters()) == self._addresses:
            return False
        self._place()  # parameters were replaced: the old memory is not used any more
        return True


def _addresses(live: Mapping[str, Any]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in live.items()}


def _check_names(names: set[str], shape: ModelShape) -> None:
    known = {piece.name for one in fused(shape, EngineRank()) for piece in one.pieces}
    if unknown := sorted(names - known):
        raise not_mapped("run", unknown[0])


def _check_placed(engine: EngineAdapter, placed: Mapping[str, Placed]) -> bool:
    """Compare the weights with the checkpoint; return whether it has all. Raises: StateError, if one is elsewhere."""
    left = placed.keys() - {HEAD}  # which a checkpoint with tied weights does not have
    try:
        for name, tensor in engine.checkpoint():
            if one := placed.get(name):
                check_loaded({name: one}, {name: tensor.to(one.tensor.dtype)})
                left -= {name}
    except StateError:
        raise
    except Exception as e:  # noqa: BLE001 - a loader may raise anything, and without one there is nothing to compare
        logger.warning("Could not compare the engine's weights with a checkpoint: %s.", e)
        return False
    return not left


class MirroredWeights:
    """A copy of the checkpoint in host memory, from which the model's own loader loads.

    Raises: StateError, if the engine was not started with a checkpoint of the run's model in the run's dtypes.
    """

    mode = "mirror"
    slices: Slices | None = None

    def __init__(self, engine: EngineAdapter, layout: Layout) -> None:
        engine.check_loader()
        self._engine, self._layout = engine, layout
        for spec in layout.tensors:
            if spec.dtype not in ("F32", *CASTS):
                raise StateError(f"tensor {spec.name!r} has dtype {spec.dtype}, which a mirror does not support")
        self.tensors = new_torch_tensors(layout)
        self._loaded = False  # whether the engine has the weights of the mirror
        self._seen: _Fingerprint | None = None  # of the engine's tensors, after they were last loaded
        self._fill()

    def _fill(self) -> None:
        """Start from the checkpoint that the engine was started with, so that less is fetched."""
        units = set(map(_unit, self.tensors))
        try:
            for name, tensor in self._engine.checkpoint():
                mine = self.tensors.get(name)
                unknown = mine is None and _unit(name) in units and not name.endswith(_NOT_LOADED)
                packed = mine is not None and (tensor.element_size() == 1 or not tensor.is_floating_point())
                if unknown or packed:
                    raise StateError(
                        f"the engine was started with a checkpoint that has {name!r} in {tensor.dtype}, in which the "
                        "run does not have it: a quantised checkpoint cannot follow a run of plain weights. Start the "
                        "engine with a plain checkpoint, and let the engine quantise it as it loads",
                        tensor=name,
                    )
                if mine is not None and (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype):
                    mine.copy_(tensor)
        except StateError:
            raise
        except Exception as e:  # noqa: BLE001 - a loader may raise anything, and an anchor has all the weights
            logger.info("The mirror starts empty: %s.", e)

    def load(self, names: Collection[str]) -> None:
        """As `PlacedWeights.load`: complete layers, and at first all of them."""
        wanted = set(self.tensors) if not self._loaded else self._units(names)
        if not wanted:
            return
        self._loaded, self._seen = False, None  # until all of it is loaded
        in_layers = sorted(wanted, key=_natural)  # so that the loader can free memory
        loaded = self._engine.load_weights((name, self.tensors[name]) for name in in_layers)
        self._check_complete(loaded, everything=len(wanted) == len(self.tensors))
        self._engine.refresh_packed()
        self._loaded, self._seen = True, _Fingerprint(self._engine)

    def _check_complete(self, loaded: set[str] | None, everything: bool) -> None:
        """Check which parameters the model's loader reports as loaded. Raises: StateError."""
        if loaded is None:
            logger.warning("The model's loader does not report which parameters it has loaded, so this is not checked.")
            return
        plain = everything and not self._engine.is_quantised()  # quantising adds parameters
        names = [name for name, _ in self._engine.model.named_parameters()] if plain else []
        missing = {name.replace(".base_layer.", ".") for name in names} - loaded - {HEAD}
        if missing or not loaded:
            first = min(missing, default=None)
            what = f"did not load {first!r}" if first else "loaded no parameter"
            raise StateError(
                f"the model's loader {what} from the run's tensors; check that the run is of this model", tensor=first
            )

    def _units(self, names: Collection[str]) -> set[str]:
        """Return all tensors of the layers that these tensors belong to: a layer is loaded completely or not at all."""
        units = {_unit(alias) for alias, name in self._layout.ties.items() if name in names} | set(map(_unit, names))
        return {name for name in self.tensors if _unit(name) in units}

    def refresh(self) -> bool:
        if self._seen is None or self._seen.fits(self._engine):
            return False
        self._loaded = False  # so that the next `load` loads all tensors
        return True


EngineWeights: TypeAlias = PlacedWeights | MirroredWeights

_NOT_LOADED = ("rotary_emb.inv_freq",)  # in some old checkpoints, and computed by every loader
_UNIT = re.compile(r"(.*?\.\d+\.[^.]+)\.")  # up to the name after the first number: model.layers.3.self_attn


def _unit(name: str) -> str:
    match = _UNIT.match(name)
    return match[1] if match else name.rpartition(".")[0]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


class _Fingerprint:
    """Addresses and checksums of an engine's tensors: enough to notice that it slept, or loaded other weights.

    Packed weights cannot be read. Each packing is an object of its own, to which a weak reference is kept: if it is
    replaced, something has loaded weights.
    """

    def __init__(self, engine: EngineAdapter) -> None:
        self._tensors = _checksums(engine.model)
        self._packed = [weakref.ref(one) for one in engine.derived()]

    def fits(self, engine: EngineAdapter) -> bool:
        packed, seen = engine.derived(), [one() for one in self._packed]
        if len(packed) != len(seen) or any(a is not b for a, b in zip(packed, seen, strict=True)):
            return False
        return _checksums(engine.model) == self._tensors


def _checksums(model: Any) -> dict[str, tuple[Any, ...]]:
    import torch

    found = {}
    for name, tensor in model.named_parameters():
        bits = tensor.data.reshape(-1).view(torch.uint8)
        words = bits[: bits.numel() // 4 * 4].view(torch.int32)
        found[name] = (tensor.data_ptr(), tuple(tensor.shape), int(words.sum(dtype=torch.int64)))
    return found


def changed_names(layout: Layout, before: Mapping[int, Any], after: Mapping[int, Any]) -> set[str]:
    """Return the tensors of tiles whose digests differ."""
    return {name for n, total in after.items() if before.get(n) != total for name in layout.tiles[n].names}
