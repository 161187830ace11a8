"""The trainer's end where a model is spread over processes: one version, made of what each of them has uploaded.

    team = Collective(torch.distributed.new_group())           # a group for nothing else
    pub = ShardedPublisher("s3://bucket/run", team)            # on every rank
    for step in range(steps):
        train_one_step(model)                                  # FSDP2, tensor-parallel, or both
        pub.publish(model, step=step, wait=False)
    pub.close()                                                # on every rank

Each tile of the run belongs to one rank, which keeps the last version of it and no more, compares, encodes and uploads
it. The ranks send each other digests and sizes; rank 0, the coordinator, writes the records. Workers see no difference.
"""

from typing import Any

from pulsesync.group.collective import Team
from pulsesync.publish.publisher import Publisher
from pulsesync.store import Store


class ShardedPublisher(Publisher):
    """Publishes a model that is sharded over a team of processes: into a new run, or an existing one, which is resumed.

    Every rank creates one with the same arguments and calls the same methods in the same order, with the same `step`,
    `wait`, `now` and `coalesce`. A source is a module, state dict or mapping whose values are DTensors, `Placed`, or
    tensors that are complete on this rank, in host memory or on this rank's GPU. Reports are of the whole version;
    their times are this rank's.

    If one rank fails, no rank publishes: the rank that failed raises its own error and the others one of the same kind
    that names it (`failed_rank`), or a GroupError; no base advances, and the next publish covers both steps. With
    wait=False that happens in the background. If some rank's caller has not read it from the future, `publish` then
    raises it on all ranks in the same later call, even if a version has made up for it by then: so all may catch it and
    go on. A rank that is behind the others when they fail may find that a call is in no version; its future says so.

    If a rank dies, the others get a GroupError when the team's timeout is over, which has to be long enough for the
    slowest rank's upload, and for what one rank alone does between two calls. With wait=False every later publish
    raises it again; a new team and a new publisher resume the run.

    With wait=False the team is used by a thread in the background: it must have a process group of its own. A version
    then ends with the latest call of publish that any rank has made when it is sent, and the others wait for theirs.

    A run is resumed if each of its tiles lies completely in some rank's shards, as it does with the same team, or with
    fewer and larger shards. Otherwise the full state is published again, in the same run.

    Args:
        location: A path or URL of the run, or a store.
        team: The processes, such as `Collective(group)`.
        options: As for `Publisher`. Tiles end where shards do, and `grid` can cut them further; rank 0 signs with
            `signing_key`; `spool` may be the same folder on every rank.
    """

    def __init__(self, location: str | Store, team: Team, **options: Any) -> None:
        super().__init__(location, team=team, **options)
