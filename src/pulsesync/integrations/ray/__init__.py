"""Weights between the actors of a Ray cluster. Needs `pip install 'pulsesync[ray]'`.

    link = Link("run")                                                      # on the driver
    self.pub = link.publisher(rank, size); self.pub.publish(state, step=n)  # in each trainer
    self.sub = link.subscriber(); self.sub.sync(model)                      # in each rollout actor

`Link` connects them, `RayStore` is a store in Ray's object store, `ActorTeam` lets trainers publish one version
together, and `patched_sync` syncs the env-runners of an RLlib algorithm with patches. See docs/integrations/ray.md.
"""

from pulsesync.integrations.ray.link import Link
from pulsesync.integrations.ray.rllib import patched_sync
from pulsesync.integrations.ray.store import RayStore
from pulsesync.integrations.ray.team import ActorTeam

__all__ = ["ActorTeam", "Link", "RayStore", "patched_sync"]
