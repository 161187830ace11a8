"""From N trainers to M rollout actors: one object that is handed to all of them."""

from typing import Any

from pulsesync.errors import GroupError
from pulsesync.integrations.ray.store import RayStore
from pulsesync.integrations.ray.team import ActorTeam
from pulsesync.publish.publisher import Publisher
from pulsesync.publish.sharded import ShardedPublisher
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import RetryStore, Store, open_store


class Link:
    """A run by which trainers reach rollout actors. Picklable: give it to actors when they are made.

        link = Link("run")                              # on the driver; in Ray's object store
        link = Link("run", at="s3://bucket/run")        # or in any store

        pub = link.publisher(rank, size)                # in each trainer: of its shard
        pub.publish(state, step=step)
        sub = link.subscriber()                         # in each rollout actor: of what it holds
        sub.sync(model)

    No process needs the address of another. A rollout actor that was restarted syncs from an anchor; a trainer that was
    restarted resumes the run.

    Args:
        name: Name of the run in the cluster.
        at: Where the run is, a path or URL that every node reaches. None: in the object store of this node.
        timeout_s: How long to wait for a call to the object store, or for the other trainers.

    Raises:
        ValueError: `at` is a store in the memory of one process.
        PulseError: Ray is not installed, or this process is in no cluster.
    """

    def __init__(self, name: str, at: str | None = None, timeout_s: float = 60.0) -> None:
        if at is not None and at.startswith("memory://"):
            raise ValueError(f"{at} is another store in every process: leave it out for Ray's object store")
        self.name, self.at, self.timeout_s = name, at, timeout_s
        self._objects = RayStore(name, timeout_s) if at is None else None

    def publisher(self, rank: int = 0, size: int = 1, **options: Any) -> "Publisher | TeamPublisher":
        """What trainer `rank` of `size` publishes with; the options are those of `Publisher` or `ShardedPublisher`."""
        return (
            TeamPublisher(self.store(), self.team(rank, size), **options)
            if size > 1
            else Publisher(self.store(), **options)
        )

    def subscriber(self, **options: Any) -> Subscriber:
        """What a rollout actor syncs with; the options are those of `Subscriber`: slices, trust, cache, undo."""
        return Subscriber(self.store(), **options)

    def team(self, rank: int, size: int) -> ActorTeam:
        """The trainers, as a team. One of another size is another team: a run may be taken up by more or fewer."""
        return ActorTeam(f"{self.name}/{size}", rank, size, self.timeout_s)

    def store(self) -> Store:
        """Where the run is, to read, prune or copy it."""
        if self._objects is not None:
            return RetryStore(self._objects)
        assert self.at is not None
        return open_store(self.at)

    def close(self) -> None:
        """Free what the run holds in Ray's object store; a run elsewhere stays."""
        if self._objects is not None:
            self._objects.close()


class TeamPublisher(ShardedPublisher):
    """A ShardedPublisher whose ranks may be restarted: one that comes anew finds the others ready to begin with it."""

    def publish(self, source: Any, **options: Any) -> Any:
        try:
            return super().publish(source, **options)
        except GroupError as e:
            if not e.rejoin:
                raise
        return super().publish(source, **options)  # what the first attempt committed, if it did, this one settles
