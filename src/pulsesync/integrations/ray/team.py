"""A team of actors, with which trainers without a process group publish one version together."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pulsesync.errors import GroupError
from pulsesync.integrations.ray.cluster import SLACK_S, check_joined, kill_actor, named_actor, ray


@dataclass(frozen=True)
class _Reply:
    """The answer of the rendezvous to a call: a problem, or a result."""

    problem: str = ""
    rejoin: bool = False  # with a problem: other ranks are already waiting in the next generation
    generation: str = ""
    notes: tuple[bytes, ...] = ()


@dataclass
class _Generation:
    """All ranks, from the time when all have joined until one is missing. One round is open at a time."""

    id: str
    open: "asyncio.Future[_Reply]"
    number: int = 0  # of the open round
    notes: dict[int, bytes] = field(default_factory=dict)


class Rendezvous:
    """The actor through which ranks meet and exchange notes. A round is complete for all of them or for none.

    A rank that joins ends the current generation: so when a restarted rank joins, the others notice it at once.
    """

    def __init__(self) -> None:
        self._size: int | None = None
        self._coming: dict[int, asyncio.Future[_Reply]] = {}
        self._live: _Generation | None = None
        self._ended = "this rank has not joined"

    async def join(self, rank: int, size: int, timeout_s: float) -> _Reply:
        """Wait until every rank has joined; the answer names the generation."""
        self._size = self._size or size
        if size != self._size or not 0 <= rank < size:
            return _Reply(f"rank {rank} of {size} does not belong to this team of {self._size}")
        self._end(_Reply(f"rank {rank} has rejoined", rejoin=True))
        if rank in self._coming:
            self._coming.pop(rank).set_result(_Reply(f"another process has joined as rank {rank}"))
        mine: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._coming[rank] = mine
        if len(self._coming) == size:
            self._begin()
        done, _ = await asyncio.wait([mine], timeout=timeout_s)
        if not done:
            del self._coming[rank]
            missing = sorted(set(range(size)) - self._coming.keys() - {rank})
            mine.set_result(_Reply(f"waited {timeout_s:g} s for ranks {missing}, which did not join"))
        return mine.result()

    async def gather(self, generation: str, rank: int, number: int, note: bytes, timeout_s: float) -> _Reply:
        """Send a note to a round, and wait for those of the others."""
        live = self._live
        if live is None or live.id != generation:
            return _Reply(f"the team has ended: {self._ended}", rejoin=bool(self._coming))
        if number != live.number or rank in live.notes:
            return self._end(_Reply(f"rank {rank} is in round {number}, but the others are in round {live.number}"))
        live.notes[rank] = note
        mine = live.open
        if len(live.notes) == self._size:
            mine.set_result(_Reply(notes=tuple(live.notes[r] for r in range(self._size))))
            live.open, live.number, live.notes = asyncio.get_running_loop().create_future(), number + 1, {}
        done, _ = await asyncio.wait([mine], timeout=timeout_s)
        if not done:
            missing = sorted(set(range(self._size or 0)) - live.notes.keys())
            self._end(_Reply(f"rank {rank} waited {timeout_s:g} s for ranks {missing}"))
        return mine.result()

    def _begin(self) -> None:
        self._live = _Generation(secrets.token_hex(8), asyncio.get_running_loop().create_future())
        for waiting in self._coming.values():
            waiting.set_result(_Reply(generation=self._live.id))
        self._coming = {}

    def _end(self, answer: _Reply) -> _Reply:
        """Give this answer to all ranks that wait in the open round, and end the generation."""
        if self._live is not None:
            self._live.open.set_result(answer)
            self._live, self._ended = None, answer.problem
        return answer


class ActorTeam:
    """Processes of a Ray cluster that know the name of their team, numbered from 0. A `collective.Team`.

    They meet at the first `gather`. After a GroupError they meet again at the next one, even if a rank is another
    process by then: every rank repeats its work from its first `gather`. If the error has `rejoin`, others are already
    waiting for that.

    Args:
        name: Name of the team in the cluster.
        rank: Number of this process in the team.
        size: Number of processes; it stays the same for as long as the team exists, until `close`.
        timeout_s: How long to wait for the others, each time.
    """

    def __init__(self, name: str, rank: int, size: int, timeout_s: float = 60.0) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to size - 1; got rank {rank} of size {size}")
        self.name, self.rank, self.size, self.timeout_s = name, rank, size, timeout_s
        self._meeting: Any = None
        self._generation = ""  # empty: not joined
        self._number = 0  # of the next round

    def gather(self, note: bytes) -> list[bytes]:
        try:
            if not self._generation:
                joined = self._ask(lambda meeting: meeting.join.remote(self.rank, self.size, self.timeout_s))
                self._generation, self._number = joined.generation, 0
            where = self._generation, self.rank, self._number
            answer = self._ask(lambda meeting: meeting.gather.remote(*where, bytes(note), self.timeout_s))
        except BaseException:
            self._generation = ""  # after any error, the others do not wait in this round any more
            raise
        self._number += 1
        return list(answer.notes)

    def close(self) -> None:
        """End the team for all its ranks: those that wait get a GroupError."""
        kill_actor(self._actor_name)

    @property
    def _actor_name(self) -> str:
        return f"team/{self.name}"

    def _ask(self, call: Callable[[Any], Any]) -> _Reply:
        try:
            if self._meeting is None:
                self._meeting = named_actor(Rendezvous, self._actor_name)
            check_joined()  # the team may have been made in a cluster that this process has left
            answer: _Reply = ray().get(call(self._meeting), timeout=self.timeout_s + SLACK_S)
        except ray("exceptions").RayError as e:
            self._meeting = None
            said = str(e).splitlines()[0][:200]
            raise GroupError(f"{self.name}, rank {self.rank}: {said}", rank=self.rank) from e
        if answer.problem:
            raise GroupError(f"{self.name}, rank {self.rank}: {answer.problem}", rank=self.rank, rejoin=answer.rejoin)
        return answer
