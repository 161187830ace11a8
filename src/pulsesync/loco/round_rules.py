"""The rules of a round among trainers that exchange updates through a store. No I/O: `store` asks, and acts."""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pulsesync.errors import BaseMismatchError, FormatError, VerificationError
from pulsesync.format.json_reader import load_json
from pulsesync.loco.gate import SparseVector
from pulsesync.loco.outer_step import LARGEST_UPDATE, diverges
from pulsesync.loco.shared import MAX_TRAINERS

FORMAT = "pulse-loco-round/1"
MAX_RECORD_BYTES = 1 << 20
CROWD = 2  # the most members of a round, as a multiple of the configured number of trainers
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Announced:
    """What the names of a round's objects state."""

    present: frozenset[str]  # trainers that take part
    left: frozenset[str]  # trainers that do not
    sent: tuple[tuple[str, str], ...]  # trainers and the ids of their payloads

    @classmethod
    def of(cls, names: Iterable[str]) -> "Announced":
        """Read the names of a round's objects. Those that are none of a trainer's are ignored."""
        named: dict[str, set[str]] = {"present": set(), "left": set()}
        sent: list[tuple[str, str]] = []
        for path in names:
            what, _, name = path.rpartition("/")
            trainer, _, id_ = name.partition(".")
            if what in named and NAME.fullmatch(name):
                named[what].add(name)
            elif what == "sent" and NAME.fullmatch(trainer) and _ID.fullmatch(id_):
                sent.append((trainer, id_))
        return cls(frozenset(named["present"]), frozenset(named["left"]), tuple(sent))


@dataclass(frozen=True)
class RoundRules:
    """When a round is decided, and of whom."""

    trainers: int  # that the first round waits for
    quorum: int  # of trainers, that a round needs after the deadline
    deadline_s: float  # for trainers that announced themselves, after this one has sent its update
    patience_s: float  # for a quorum

    @property
    def most(self) -> int:
        """The most members of a round. Names beyond that are not waited for, and what they sent is not read."""
        return CROWD * self.trainers

    def expected(self, announced: Announced, known: Collection[str]) -> set[str]:
        """The trainers to wait for; those of the last round come first."""
        coming = announced.present.union(known) - announced.left
        return set(sorted(coming, key=lambda name: (name not in known, name))[: self.most])

    def is_time(self, round_: int, found: Collection[str], expected: set[str], waited_s: float) -> bool:
        """Whether to decide a round: all expected payloads are there, or a quorum is and the deadline has passed."""
        enough = self.trainers if round_ == 1 else self.quorum
        in_time = len(found) >= enough and expected.issubset(found)
        return in_time or (waited_s >= self.deadline_s and len(found) >= self.quorum)

    def without_diverged(
        self, round_: int, found: Mapping[str, str], updates: Mapping[str, SparseVector]
    ) -> dict[str, str]:
        """Leave out the trainers whose updates diverge, if the others make a quorum; otherwise return all of them.

        A round with all of them is empty if their mean diverges. found, updates: the ids of payloads, and what these
        have, by trainer.
        """
        large = [trainer for trainer in sorted(found) if diverges(updates[trainer].values)]
        rest = {trainer: id_ for trainer, id_ in found.items() if trainer not in large}
        if not large or len(rest) < self.quorum:
            return dict(found)
        logger.warning(
            "Round %d is decided without %s: their updates have values above %g.",
            round_,
            ", ".join(large),
            LARGEST_UPDATE,
        )
        return rest

    def check_same_state(
        self, round_: int, base: str, found: Collection[str], others: Mapping[str, BaseMismatchError]
    ) -> None:
        """Raises: VerificationError, if there is no quorum because some trainers are at another shared state."""
        if others and len(found) + len(others) >= self.quorum:
            raise VerificationError(
                f"replicas have diverged: in round {round_}, {', '.join(others)} are at another shared state than "
                f"{', '.join(sorted(found))}, and neither side has a quorum of {self.quorum}. Stop all trainers, and "
                "start them at a new location, the first one from the state_dict() to continue from",
                expected=base,
                actual=next(iter(others.values())).actual,
            )


def build_decision(base: str, members: Mapping[str, str]) -> bytes:
    """The record of a round: the state that it continues from, and the payloads of its members."""
    return build_record({"format": FORMAT, "base": base, "members": dict(sorted(members.items()))})


def parse_decision(data: bytes, round_: int) -> tuple[str, dict[str, str]]:
    """Read the record of a round: the state it continues from, and ids of payloads by trainer. Raises: FormatError."""
    record = load_json(data, "the decision of a round")
    members = record.get("members")
    if set(record) != {"format", "base", "members"} or record["format"] != FORMAT or not isinstance(members, dict):
        raise FormatError(f"the decision of round {round_} does not have the expected fields")
    if not 1 <= len(members) <= MAX_TRAINERS or list(members) != sorted(members):
        raise FormatError(f"the decision of round {round_} must list 1 or more trainers, in order")
    if not all(NAME.fullmatch(name) and isinstance(id_, str) and _ID.fullmatch(id_) for name, id_ in members.items()):
        raise FormatError(f"the decision of round {round_} lists a bad name or payload id")
    return record["base"], members


def build_record(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
