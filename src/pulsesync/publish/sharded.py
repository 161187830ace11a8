"""The trainer's end for a model that is sharded over processes: each uploads its part of a version.

    team = Collective(torch.distributed.new_group())           # a group for nothing else
    pub = ShardedPublisher("s3://bucket/run", team)            # on every rank
    for step in range(steps):
        train_one_step(model)                                  # FSDP2, tensor-parallel, or both
        pub.publish(model, step=step, wait=False)
    pub.close()                                                # on every rank

Each tile of the run belongs to one rank, which keeps the tile's last version, compares, encodes and uploads it. The
ranks send each other digests and sizes; rank 0, the coordinator, writes the records. Workers see no difference.
"""

from typing import Any

from pulsesync.group.collective import Team
from pulsesync.publish.publisher import Publisher
from pulsesync.store import Location


class ShardedPublisher(Publisher):
    """Publishes a model that is sharded over a team of processes, into a new run or an existing one, which it resumes.

    Every rank creates one with the same arguments and calls the same methods in the same order, with the same `step`,
    `wait`, `now` and `coalesce`. A source is a module, state dict or mapping whose values are DTensors, `Placed`, or
    tensors that are complete on this rank, in host memory or on this rank's GPU. Reports describe the entire version;
    their times are those of this rank.

    If one rank fails, no rank publishes: the rank that failed raises its own error, and the others raise one of the
    same class that names it (`failed_rank`), or a GroupError; no base advances, and the next publish contains the
    changes of both steps. With wait=False that happens in the background. If some rank's caller has not read it from
    the future, `publish` raises it on all ranks in the same later call, even if a later version contains the step by
    then: so all ranks can catch it and continue. For a rank that has made fewer calls than the others when they fail,
    a call may be in no version; its future raises the error.

    If a rank dies, the others get a GroupError when the team's timeout is over, which must be long enough for the
    slowest rank's upload, and for any work of a single rank between two calls. With wait=False every later publish
    raises it again; create a new team and a new publisher to resume the run.

    With wait=False a background thread uses the team, so the team must have a process group of its own. A version then
    ends with the latest call of publish that any rank has made when it is sent; the other ranks send it when they have
    made that call.

    A run is resumed if each of its tiles lies completely in some rank's shards, as it does with the same team, or with
    fewer and larger shards. Otherwise the full weights are published again, in the same run.

    Args:
        location: A path or URL of the run, or a store.
        team: The processes, such as `Collective(group)`.
        options: As for `Publisher`. Tiles end where shards do, and `grid` can cut them further; rank 0 signs with
            `signing_key`; `spool` may be the same folder on every rank.
    """

    def __init__(self, location: Location, team: Team, **options: Any) -> None:
        super().__init__(location, team=team, **options)
