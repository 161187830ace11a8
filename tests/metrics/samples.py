"""One event of each kind."""

from typing import Any

from pulsesync import events

RUN = "s3://bucket/run"


def synced(**others: Any) -> events.Synced:
    given: dict[str, Any] = {
        "location": RUN,
        "version": 7,
        "step": 70,
        "from_version": 5,
        "newest": 9,
        "path": ("patch", "patch"),
        "changed": 10,
        "fetched_bytes": 1000,
        "replanned": 1,
        "fetch_s": 0.5,
        "prepare_s": 0.25,
        "pause_s": 0.004,
        "repaired": ("a", "b"),
    }
    return events.Synced(**{**given, **others})


def sync_failed(**others: Any) -> events.SyncFailed:
    given: dict[str, Any] = {"location": RUN, "version": 7, "error": "no route", "retryable": True, "torn": False}
    return events.SyncFailed(**{**given, **others})


def request_served(**others: Any) -> events.RequestServed:
    given: dict[str, Any] = {
        "location": RUN,
        "method": "GET",
        "status": 200,
        "cache": "hit",
        "store_failed": False,
        "sent_bytes": 100,
        "seconds": 0.01,
    }
    return events.RequestServed(**{**given, **others})


PUBLISHED = events.VersionPublished(
    location=RUN,
    version=8,
    step=80,
    changed=10,
    total=1000,
    payload_bytes=300,
    full_bytes=2000,
    coalesced=1,
    blocked_s=0.001,
    encode_s=0.02,
    store_s=0.03,
    codec="history",
)

SAMPLES: tuple[events.Event, ...] = (
    PUBLISHED,
    events.PublishFailed(location=RUN, step=81, error="no route", retryable=True),
    events.AnchorPublished(location=RUN, version=8, payload_bytes=1500, seconds=2.0),
    synced(),
    sync_failed(),
    events.Recounted(location=RUN, version=7, equal=True, seconds=0.1),
    events.TransferProgress(location=RUN, what="anchor", done_bytes=10, total_bytes=1500),
    events.EngineUpdated(
        location=RUN, version=7, step=70, from_version=6, changed=10, fetched_bytes=100, pause_s=0.01, seconds=0.5
    ),
    events.EngineUpdateFailed(location=RUN, error="StoreError: no route", retryable=True, torn=False),
    events.GroupSynced(
        rank=3,
        version=4,
        method="patch",
        changed=10,
        total=1000,
        full_bytes=2000,
        sent_bytes=0,
        received_bytes=300,
        seconds=0.2,
        pause_s=0.01,
    ),
    events.GroupSyncFailed(rank=3, error="rank 1 does not answer"),
    events.RoundCompleted(
        fragment=0,
        round=5,
        took_part=True,
        members=4,
        sent=10,
        total=1000,
        sent_bytes=50,
        received_bytes=150,
        seconds=0.7,
    ),
    events.RoundFailed(fragment=0, round=6, error="no round"),
    request_served(),
)
