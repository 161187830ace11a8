"""Connect N trainers and M rollout actors through one object that is passed to all of them."""

from typing import Any

from pulsesync.core.location import ParsedLocation
from pulsesync.errors import GroupError
from pulsesync.integrations.ray.store import RayStore
from pulsesync.integrations.ray.team import ActorTeam
from pulsesync.publish.publisher import Publisher
from pulsesync.publish.sharded import ShardedPublisher
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import RetryStore, Store, open_store


class Link:
    """A run through which trainers send weights to rollout actors. It can be pickled: pass it to actors' constructors.

        link = Link("run")                              # on the driver; in Ray's object store
        link = Link("run", at="s3://bucket/run")        # or in any store

        pub = link.publisher(rank, size)                # in each trainer: publishes its shard
        pub.publish(state, step=step)
        sub = link.subscriber()                         # in each rollout actor: syncs its weights
        sub.sync(model)

    No process needs the address of another. A rollout actor that was restarted syncs from an anchor; a trainer that was
    restarted resumes the run.

    Args:
        name: Name of the run in the cluster.
        at: Where the run is, a path or URL that every node can reach. None: in the object store of this node.
        timeout_s: How long to wait for a call to the object store, or for the other trainers.

    Raises:
        ValueError: `at` is a store in the memory of one process.
        PulseError: Ray is not installed, or this process is not connected to a cluster.
    """

    def __init__(self, name: str, at: str | None = None, timeout_s: float = 60.0) -> None:
        if at is not None and ParsedLocation.parse(at).scheme == "memory":
            raise ValueError(
                f"at={at!r} would be a different store in every process: leave at= out to use Ray's object store, or "
                "give a path or URL that every node can reach"
            )
        self.name, self.at, self.timeout_s = name, at, timeout_s
        self._objects = RayStore(name, timeout_s) if at is None else None

    def publisher(self, rank: int = 0, size: int = 1, **options: Any) -> "Publisher | TeamPublisher":
        """Return the publisher of trainer `rank` of `size`; options as for `Publisher` or `ShardedPublisher`."""
        store = self.store()
        return TeamPublisher(store, self.team(rank, size), **options) if size > 1 else Publisher(store, **options)

    def subscriber(self, **options: Any) -> Subscriber:
        """Return the subscriber of a rollout actor; options as for `Subscriber`: slices, trust, cache, undo."""
        return Subscriber(self.store(), **options)

    def team(self, rank: int, size: int) -> ActorTeam:
        """Return the team of trainers. Another size is another team: more or fewer trainers may resume a run."""
        return ActorTeam(f"{self.name}/{size}", rank, size, self.timeout_s)

    def store(self) -> Store:
        """Return the store of the run, to read, prune or copy it."""
        if self._objects is not None:
            return RetryStore(self._objects)
        assert self.at is not None
        return open_store(self.at)

    def close(self) -> None:
        """Delete the run from Ray's object store; a run elsewhere is kept."""
        if self._objects is not None:
            self._objects.close()


class TeamPublisher(ShardedPublisher):
    """A ShardedPublisher whose ranks may be restarted: the others begin again with a rank that rejoins."""

    def publish(self, source: Any, **options: Any) -> Any:
        try:
            return super().publish(source, **options)
        except GroupError as e:
            if not e.rejoin:
                raise
        return super().publish(source, **options)  # finds out whether the first attempt was committed
