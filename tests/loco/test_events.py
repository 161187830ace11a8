"""What a trainer emits and logs of its rounds."""

import logging
from typing import Any

import pytest

import pulsesync as pulse
from pulsesync import events
from pulsesync.errors import RoundError, StoreError
from pulsesync.store import MemoryStore
from tests.loco.fleet import Trainer, alone, meet, together


def test_every_round_is_emitted_with_what_its_report_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pulsesync")
    received: list[events.Event] = []
    store = MemoryStore()
    with pulse.listen(received.append):
        trainers = together(*(lambda n=n: Trainer(meet(store, f"t{n}", 2), n) for n in range(2)))
        together(*(t.__enter__ for t in trainers))
        together(*(lambda t=t: t.step(4) for t in trainers))
        together(*(lambda t=t: t.__exit__(None, None, None) for t in trainers))
    completed = [event for event in received if isinstance(event, events.RoundCompleted)]
    reports = [report for t in trainers for report in t.reports]
    assert len(completed) == len(reports) == 4

    def facts(one: Any, members: int) -> tuple[Any, ...]:
        names = ("round", "fragment", "took_part", "sent", "total", "sent_bytes", "received_bytes", "seconds")
        return (members, *(getattr(one, name) for name in names))

    assert sorted(facts(event, event.members) for event in completed) == sorted(
        facts(report, len(report.members)) for report in reports
    )
    assert {event.members for event in completed} == {2}
    lines = [record.getMessage() for record in caplog.records if record.name == "pulsesync.loco.rounds"]
    assert sum(line.startswith("Round 2 of fragment 0 is complete with 2 trainers: ") for line in lines) == 2


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("error", [RoundError("nobody came"), StoreError("no answer", retryable=True)], ids=repr)
def test_a_round_that_fails_is_emitted_and_the_next_one_is_complete(delay: int, error: Exception) -> None:
    received: list[events.Event] = []
    exchange: Any = alone()
    with Trainer(exchange, 0, delay=delay) as t, pulse.listen(received.append):
        propose, fails = exchange.propose, [True]

        def propose_later(*args: Any) -> Any:
            if fails and fails.pop():
                raise error
            return propose(*args)

        exchange.propose = propose_later
        with pytest.raises(type(error)):
            t.step(3)
        t.step(3)
    failed, *completed = received
    assert isinstance(failed, events.RoundFailed)
    assert (failed.fragment, failed.round) == (0, 1)
    assert failed.error == f"{type(error).__name__}: {error}"
    assert [event.round for event in completed if isinstance(event, events.RoundCompleted)][:1] == [1]


def test_a_step_of_ddp_is_a_round() -> None:
    received: list[events.Event] = []
    with Trainer(alone(), 0, "DDP", watch=False) as t, pulse.listen(received.append):
        t.step(3)
    assert [event.round for event in received if isinstance(event, events.RoundCompleted)] == [1, 2, 3]
