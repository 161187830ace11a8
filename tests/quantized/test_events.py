"""What a worker with quantised weights emits: its own syncs, not those of its mirror."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pulsesync as pulse  # noqa: E402
from pulsesync import VerificationError, events  # noqa: E402
from pulsesync.quantized import QuantizedSubscriber  # noqa: E402
from tests.quantized.test_subscriber import Place, Trainer  # noqa: E402


def test_a_sync_is_emitted_once_with_the_pause_of_the_workers_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.run.reporting.IDLE_S", 0.0)  # a sync that finds nothing new is emitted each time
    received: list[events.Event] = []
    trainer = Trainer(Place("cpu"))
    worker = trainer.worker("vllm-fp8-block")
    with QuantizedSubscriber(trainer.store, "vllm-fp8-block") as sub:
        with pulse.listen(received.append):
            reports = [sub.sync(worker)]
            trainer.nudge()
            reports += [sub.sync(worker), sub.sync(worker)]
            assert sub.roll_back() == 0
        synced: list[Any] = [event for event in received if isinstance(event, events.Synced)]
        assert [event.version for event in synced] == [0, 1, 1, 0]
        assert [event.newest for event in synced] == [0, 1, 1, 1]
        for event, report in zip(synced, reports, strict=False):
            assert (event.pause_s, event.changed, event.path) == (report.apply_s, report.changed, report.plain.path)
            assert event.prepare_s >= report.quantize_s + report.plain.apply_s
            assert event.fetched_bytes == report.plain.fetched_bytes
        assert (synced[2].path, synced[2].changed) == ((), 0)
        assert (synced[3].path, synced[3].from_version) == (("undo",), 1)
        assert synced[3].changed > 0


def test_recounts_of_mirror_and_tensors_and_failures_are_emitted() -> None:
    received: list[events.Event] = []
    trainer = Trainer(Place("cpu"))
    worker = trainer.worker("vllm-fp8-block")
    with QuantizedSubscriber(trainer.store, "vllm-fp8-block") as sub:
        sub.sync(worker)
        with pulse.listen(received.append) as listening:
            sub.verify()
            assert listening.flush()
            assert [event.equal for event in received if isinstance(event, events.Recounted)] == [True, True]
            worker["norm.weight"][1] = 5.0
            with pytest.raises(VerificationError):
                sub.verify()
            assert listening.flush()
            assert [event.equal for event in received if isinstance(event, events.Recounted)] == [True] * 3 + [False]
            with pytest.raises(pulse.StateError):
                sub.sync({"another": torch.zeros(3)})
        failed = received[-1]
        assert isinstance(failed, events.SyncFailed)
        assert failed.newest == 0
        assert not any(isinstance(event, events.Synced) for event in received)
