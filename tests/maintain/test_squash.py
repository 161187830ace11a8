"""A squasher follows a run of its own accord: it must notice that the run is another one."""

import pytest

from pulsesync.errors import RunReplacedError
from pulsesync.run import reader
from pulsesync.store import MemoryStore
from tests.readers import Squasher
from tests.runs import Training, publish_steps


def test_a_run_that_was_replaced_raises_once_and_is_then_squashed_from_its_own_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.0)
    store = MemoryStore()
    publish_steps(store, 6, anchor_every=1e9, epoch_patches=2)
    squasher = Squasher(store, epoch_patches=2)
    assert [(one.base, one.version) for one in squasher.run()] == [(0, 2), (2, 4), (0, 4)]
    for prefix in ("manifests/", "anchors/", "starts/", "squashes/"):
        for entry in list(store.list(prefix)):
            store.delete(entry.key)
    store.delete("head")
    publish_steps(store, 7, Training(seed=1), anchor_every=1e9, epoch_patches=2)
    with pytest.raises(RunReplacedError):
        squasher.run()
    assert [(one.base, one.version) for one in squasher.run()] == [(0, 2), (2, 4), (0, 4), (4, 6)]
