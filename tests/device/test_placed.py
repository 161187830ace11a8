"""Weights of an inference engine on a device: parts of the run's tensors, compared with a checkpoint and synced."""

import pytest
import torch

from pulsesync import Publisher, Subscriber
from pulsesync.errors import StateError
from pulsesync.integrations.runtime import check_loaded, for_subscriber
from pulsesync.state.sharding import Placed
from pulsesync.store import MemoryStore
from tests.device.test_baseline import on

WHOLE = torch.arange(48, dtype=torch.int16).view(torch.bfloat16).view(6, 8)


def test_what_an_engine_has_loaded_is_held_against_the_checkpoint(device: str) -> None:
    mine = WHOLE[2:4].clone().to(device)
    placed = {"a": Placed(mine, (6, 8), rows=(2, 4))}
    check_loaded(placed, {"a": WHOLE})
    check_loaded(placed, {"a": WHOLE.to(device)})
    mine[1, 7] += 1
    with pytest.raises(StateError, match="not at the position that the map names"):
        check_loaded(placed, {"a": WHOLE})


def test_a_part_follows_a_run(device: str, many_lanes: None) -> None:
    store, weights = MemoryStore(), WHOLE.clone()
    mine = torch.zeros(2, 8, dtype=torch.bfloat16, device=device)
    tensors, slices = for_subscriber({"a": Placed(mine, (6, 8), rows=(2, 4))})
    with Publisher(store, codec="history", grid={"a": ([2, 4], [])}, min_tile=1) as pub:
        worker = Subscriber(store, slices=slices)
        for step in range(3):
            pub.publish({"a": weights}, step=step)
            with on(device):
                worker.sync(tensors)
            assert torch.equal(mine.cpu(), weights[2:4])
            weights[step + 1] += 1
