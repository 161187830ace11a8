"""What a publisher adds to a checkpoint of the trainer, and how it continues the run that a checkpoint names."""

import logging
import reprlib
from typing import TypedDict

from pulsesync.errors import RunReplacedError
from pulsesync.format.manifest import Manifest
from pulsesync.run.reader import RunReader, location_of

logger = logging.getLogger(__name__)


class PublisherState(TypedDict, total=False):
    """The last committed version. Empty before the first."""

    run: str
    version: int
    step: int
    digest: str


def state_of(last: Manifest) -> PublisherState:
    return {"run": last.run, "version": last.version, "step": last.step, "digest": last.digest}


def checked_state(state: PublisherState) -> PublisherState:
    """Return a copy of a state. Raises: ValueError, if `state_dict` did not return it."""
    kinds = PublisherState.__annotations__
    if not isinstance(state, dict) or {name: type(value) for name, value in state.items()} not in ({}, kinds):
        raise ValueError(
            f"load_state_dict needs what state_dict() of a Publisher returned, a dictionary with {', '.join(kinds)}, "
            f"or an empty one; got {reprlib.repr(state)}"
        )
    return state.copy()


def check_continues(state: PublisherState, reader: RunReader, last: Manifest | None) -> None:
    """Check that the run at a location, whose newest version is given, is the one that a trainer's checkpoint names.

    Raises: RunReplacedError, RunForkedError, RunRolledBackError: it is another run; FormatError, StoreError.
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
    text = (
        "The trainer's checkpoint names version %d (step %d), and the run is at version %d (step %d); the next version "
        "is a patch to the newest one."
    )
    logger.info(text, version, state["step"], last.version, last.step)
