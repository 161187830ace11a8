"""Resuming a run: what is checked before a publisher adds its first version to a run that exists."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from pulsesync.core.types import TensorSpec
from pulsesync.errors import RunReplacedError, StateError
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.run.reader import RunReader, location_of
from pulsesync.store import Store

logger = logging.getLogger(__name__)


class PublisherState(TypedDict, total=False):
    """What a publisher adds to a checkpoint of the trainer: the last committed version. Empty before the first."""

    run: str
    version: int
    step: int
    digest: str


def check_continues(state: PublisherState, reader: RunReader, last: Manifest | None) -> None:
    """Check that the run at a location, whose newest version is given, is the one that a trainer's checkpoint names.

    Raises:
        RunReplacedError, RunForkedError, RunRolledBackError: it is another run; FormatError, StoreError.
    """
    run, version = state["run"], state["version"]
    advice = (
        f"the trainer was restored from a checkpoint that names version {version} of run {run}: publish to the "
        "location of that run, or leave out load_state_dict to publish to this location nevertheless"
    )
    if last is None:
        raise RunReplacedError(
            f"there is no run at {location_of(reader.store)}; {advice}", version=version, expected=run
        )
    reader.check_run(run, version, state["digest"], advice)
    logger.info(
        "The trainer's checkpoint names version %d (step %d), and the run is at version %d (step %d); the next version "
        "is a patch to the newest one.",
        version,
        state["step"],
        last.version,
        last.step,
    )


def same_tensors(layout: Layout, specs: Iterable[TensorSpec], ties: Mapping[str, str]) -> None:
    """Raises: StateError, if these are not the tensors of a run."""
    before: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in layout.tensors} | dict(layout.ties)
    now: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in specs} | dict(ties)
    if before != now:
        names = sorted({name for name, _ in before.items() ^ now.items()})
        raise StateError(
            f"the tensors of a run must not change, but {names[0]!r} was added, removed, cast, reshaped or tied; "
            "publish to a new location",
            tensor=names[0],
        )


def grafted(store: Store, last: Manifest, step: int, changed: int, total: int) -> StateError:
    """Return the error for weights that do not continue a run: those of another model or training."""
    if step > last.step:
        why = f"weights were refused by this publisher before, whose step was not above its step {last.step}"
    else:
        why = f"their step {step} is not above its step {last.step}"
    unset = "" if step else "If no step was passed, pass that of the training to a new Publisher: step=. "
    return StateError(
        f"these weights do not continue the run at {location_of(store)}: {changed:,} of {total:,} differ from its "
        f"version {last.version}, and {why}. Nothing was published. To continue a training, load its checkpoint: the "
        "model's weights, and those of publisher.state_dict() with load_state_dict() of a new Publisher. "
        f"{unset}For a training that begins anew, give a new location. To publish these weights to the workers of this "
        "run nevertheless, pass resume=True (pulse publish: --resume)"
    )
