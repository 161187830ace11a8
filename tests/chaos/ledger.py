"""What must be true after a trial: nothing wrong was used, and nothing was lost in silence."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from tests.chaos.training import right_hash
from tests.chaos.zoo import Zoo


@dataclass
class Counts:
    """The result of a trial, as it is printed."""

    trial: str
    kills: int = 0
    exits: int = 0  # ends of an interpreter while something was under way
    publishes: int = 0  # begun
    acknowledged: int = 0  # returned with wait=True, or the future resolved: these must be in the store
    failed: int = 0  # raised, or the future failed and a log line or a later call said so
    cut_off: int = 0  # the process was killed before it could acknowledge them: these may or may not be there
    versions: int = 0  # in the store, every one replayed and compared bit for bit
    syncs: int = 0  # every one hashed and compared with the trainer's weights
    refused: int = 0  # syncs that raised because the run was replaced, forked or rolled back
    wrong_weights: int = 0
    silent_losses: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        numbers = [field.name for field in fields(self) if field.name != "trial"]
        return Counts(self.trial, **{name: getattr(self, name) + getattr(other, name) for name in numbers})

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def balance(trial: str, zoo: Zoo, location: str, *, names: Iterable[str] | None = None, kept: bool = True) -> Counts:
    """Compare what the witness heard of some processes, or of all, with what the store at a location holds.

    kept: nobody but the publishers changed the store, so that everything that was acknowledged must be there.
    """
    counts = Counts(trial, kills=zoo.kills)
    found = dict(_replayed(zoo, location, counts))
    killed = zoo.killed
    started = {line["pid"]: line["name"] for line in zoo.witness.said("started")}
    pids = {pid for pid, name in started.items() if names is None or name in names}
    said = [line for line in zoo.witness.said() if line["pid"] in pids]
    for pid in {line["pid"] for line in said if line["event"] == "begun"}:
        own = [line for line in said if line["pid"] == pid]
        _balance_publisher(own, found if kept else None, counts, was_killed=pid in killed)
    for line in said:
        if line["event"] == "synced":
            counts.syncs += 1
            counts.wrong_weights += line["hash"] != right_hash(line["step"])
        counts.refused += line["event"] == "refused"
    return counts


def _balance_publisher(
    lines: list[dict[str, Any]], found: dict[int, int] | None, counts: Counts, *, was_killed: bool
) -> None:
    """Account for every publish that one process began."""
    begun = list(dict.fromkeys(line["step"] for line in lines if line["event"] == "begun"))
    resolved = {line["step"]: line for line in lines if line["event"] == "resolved"}
    failed = {line["step"] for line in lines if line["event"] == "failed"}
    raised = {line.get("step") for line in lines if line["event"] == "raised"}
    was_loud = bool(raised) or any(line["event"] == "logged" and line["level"] == "ERROR" for line in lines)
    counts.publishes += len(begun)
    for step in begun:
        if step in resolved:
            version, published = resolved[step]["version"], resolved[step]["published_step"]
            counts.acknowledged += 1
            there = found is None or (found.get(version) == published and published >= step)
            counts.silent_losses += not there
        elif step in raised or (step in failed and was_loud):
            counts.failed += 1
        elif was_killed:
            counts.cut_off += 1
        else:
            counts.silent_losses += 1


def _replayed(zoo: Zoo, location: str, counts: Counts) -> Iterable[tuple[int, int]]:
    """Have a process follow a run from its first version to its last, and compare the weights of each version."""
    zoo.start(f"replay {len(zoo.pids)}", role="replayer", location=location)
    name = list(zoo.pids)[-1]
    zoo.join(name, timeout_s=60)
    assert zoo.exit_code(name) == 0, zoo.errors()
    zoo.witness.wait_for("replayed all", 10, pid=zoo.pids[name])  # its last words may be in the pipe still
    for line in zoo.witness.said("replayed", pid=zoo.pids[name]):
        counts.versions += 1
        counts.wrong_weights += line["hash"] != right_hash(line["step"])
        yield line["version"], line["step"]
