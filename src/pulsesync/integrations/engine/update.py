"""Update all ranks of an engine together: prepare on all, and if all are ready, pause, commit on all, resume.

`moving` is the rule, without I/O: a generator that yields each step, and is sent the step's result or thrown its error.
The steps are taken by the process that serves requests, on its engine (`vllm.routes`); by a script, on an offline LLM
(`vllm.offline`); by `pulse follow`, over an engine's own routes (`vllm.server`); or by the ranks of an engine
themselves (`together`).
"""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from pulsesync import errors
from pulsesync.core.events import EngineUpdated, EngineUpdateFailed, describe_error, emit, has_listeners
from pulsesync.core.location import ParsedLocation
from pulsesync.errors import GroupError, PulseError, VerificationError
from pulsesync.integrations.engine.answers import REPORT, check_fields

logger = logging.getLogger(__name__)

LATEST = "latest"
POLL_S = 0.02  # the first wait between two checks whether all ranks are ready; it grows up to the longest
MAX_POLL_S = 0.5
CACHE_NOT_DROPPED = (
    "the engine could not drop its KV cache, which the old weights have computed; update again, or restart it"
)


@dataclass(frozen=True)
class Ask:
    """Send a message to every rank (`EngineFollower.call`). The result is the list of the answers."""

    message: dict[str, Any]


@dataclass(frozen=True)
class Wait:
    """Let some seconds pass."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """All ranks have the weights of a version: set the version, and drop caches of older weights if requested."""

    version: int


Step: TypeAlias = Ask | Wait | Finish | Literal["pause", "resume"]
Answers: TypeAlias = list[dict[str, Any]]


def moving(options: dict[str, Any], version: int | str, token: str) -> Generator[Step, Any, dict[str, Any]]:
    """Yield the steps of an update of all ranks to a version, or to "latest"; return the report.

    If a rank fails before the first weight is written, no rank writes. If one fails after that, all are rolled back.

    Args:
        options: The fields of `RunOptions`.
        version: The version to update to.
        token: Identifies this update: if another caller starts one meanwhile, this one fails.

    Raises:
        ValueError: version is neither a number nor "latest". PulseError: the update failed, with the class of the error
            on the rank; the weights of all ranks are unchanged. If the ranks cannot be rolled back, it is a
            VerificationError, and generation stays paused.
    """
    check_version(version)
    goal = version if isinstance(version, int) else int((yield from _ask("find", options=options))[0]["version"])
    versions = {state["version"] for state in (yield from _ask("status"))}
    before = versions.pop() if len(versions) == 1 else None  # there is no way back to different ones
    begun: Answers = yield Ask({"do": "prepare", "options": options, "version": goal, "token": token})
    try:
        raise_error(begun)
        yield from _all_ready(token)
        yield "pause"
    except Exception:
        yield Ask({"do": "abort", "token": token})
        yield "resume"
        raise
    try:
        reports = yield from _ask("commit", token=token)
        yield Finish(goal)
    except Exception as e:
        rolled: Answers = yield Ask({"do": "roll back", "version": before})
        if error := _first_error(rolled):
            raise VerificationError(f"{error['message']} (the update failed: {e})", torn=True) from e
        yield "resume"
        raise
    yield "resume"
    return _merged(reports)


def check_version(version: Any) -> None:
    """Raises: ValueError, if it is neither a number of a version nor "latest"."""
    if version != LATEST and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
        raise ValueError(f"version must be a number or {LATEST!r}; got {version!r}")


def run(steps: Generator[Step, Any, dict[str, Any]], take: Callable[[Step], Any]) -> dict[str, Any]:
    """Take the steps of an update one after the other, and return its report. Raises: as `moving`."""
    try:
        step = next(steps)
        while True:
            try:
                answer = take(step)
            except Exception as e:  # noqa: BLE001 - the rule handles it
                step = steps.throw(e)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _ask(do: str, **given: Any) -> Generator[Step, Any, Answers]:
    """Send a message to every rank, and return the answers. Raises: PulseError, if one is an error."""
    answers: Answers = yield Ask({"do": do, **given})
    raise_error(answers)
    return answers


def _all_ready(token: str) -> Generator[Step, Any, None]:
    """Wait until every rank has prepared the update. Raises: PulseError, if one has failed."""
    pause_s = POLL_S
    while True:
        states = yield from _ask("status")
        raise_error([{"error": state["failure"]} for state in states if state["failure"]])
        if any(state["token"] != token for state in states):
            raise GroupError(
                "another caller has started to update this engine, so this update was dropped; no rank was updated by "
                "it; update again"
            )
        if all(state["update"] == "ready" for state in states):
            return
        yield Wait(pause_s)
        pause_s = min(2 * pause_s, MAX_POLL_S)


def merged_status(ranks: Answers) -> dict[str, Any]:
    """Return an engine's status: that of rank 0, whether all ranks agree, and why one is broken. Raises: PulseError."""
    raise_error(ranks)
    return {
        **ranks[0],
        "update": next((one["update"] for one in ranks if one["update"] == "preparing"), ranks[0]["update"]),
        "failure": next((one["failure"] for one in ranks if one["failure"]), None),
        "broken": next((one["broken"] for one in ranks if one["broken"]), None),
        "ranks": len(ranks),
        "ranks_agree": len({(one["version"], one["digest"]) for one in ranks}) == 1,
    }


def _merged(reports: Answers) -> dict[str, Any]:
    return {
        **reports[0],
        "changed": sum(report["changed"] for report in reports),
        "fetched_bytes": sum(report["fetched_bytes"] for report in reports),
        "seconds": max(report["seconds"] for report in reports),
        "repaired": sorted({name for report in reports for name in report.get("repaired", ())}),
        "ranks": len(reports),
    }


def raise_error(answers: Answers) -> None:
    """Raise the error that an answer contains, with the class that it names. Raises: PulseError, if there is one."""
    if (error := _first_error(answers)) is None:
        return
    kind = getattr(errors, str(error["type"]), None)
    if isinstance(kind, type) and issubclass(kind, PulseError):
        raise kind(str(error["message"]))
    raise PulseError(f"{error['type']}: {error['message']}")


def _first_error(answers: Answers) -> dict[str, Any] | None:
    """Return the error of the rank that failed, if one did, not that of a rank to which it was reported."""
    found: Answers = [answer["error"] for answer in answers if "error" in answer]
    return min(found, key=lambda error: error["type"] == "GroupError", default=None)


@dataclass(frozen=True)
class UpdateReport:
    """What an update of an engine did."""

    version: int
    step: int
    from_version: int | None
    path: tuple[str, ...]  # as in a SyncReport
    changed: int  # weights written by all ranks
    fetched_bytes: int  # bytes fetched by all ranks
    pause_s: float  # time in which the engine did not generate
    seconds: float  # time of the slowest rank: fetching, checking, decoding and writing
    digest: str
    mode: str  # "in place" or "mirror"
    ranks: int
    repaired: tuple[str, ...] = ()  # tensors that something else had written to

    @classmethod
    def parse(cls, table: dict[str, Any]) -> "UpdateReport":
        """Read a report that was received over the network. Raises: StoreError, if it is malformed."""
        check_fields(table, REPORT)
        known = {field.name: table[field.name] for field in fields(cls)}
        return cls(**known | {"path": tuple(known["path"]), "repaired": tuple(known["repaired"])})


class UpdateEvents:
    """The events of the updates of one engine to versions of a run, in the process that drives the engine."""

    def __init__(self, location: str) -> None:
        self.location = str(ParsedLocation.parse(location))

    def updated(self, report: UpdateReport) -> UpdateReport:
        """Log and emit an update that is complete; return the report."""
        logger.info(
            "The engine is at version %d (step %d) of %s: %d weights written, %d bytes fetched, pause %.1f ms, %.2f s.",
            report.version,
            report.step,
            self.location,
            report.changed,
            report.fetched_bytes,
            1e3 * report.pause_s,
            report.seconds,
        )
        if has_listeners():
            emit(EngineUpdated.of(report, location=self.location))
        return report

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Emit an event if the block raises. It is not logged: the caller has the error."""
        try:
            yield
        except Exception as e:
            if has_listeners():
                facts = {name: bool(getattr(e, name, False)) for name in ("retryable", "torn")}
                emit(EngineUpdateFailed(location=self.location, error=describe_error(e), **facts))
            raise
