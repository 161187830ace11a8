"""The table of all metrics: what each is called, what it means, and which field of which event it is made of.

Everything that shows metrics is made from it: Prometheus, OpenTelemetry, `scalars` for experiment trackers, and the
list in docs/metrics.md. Labels have few values: a location, a rank, an outcome; never a version or a key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pulsesync.core.events import (
    AnchorPublished,
    EngineUpdated,
    EngineUpdateFailed,
    Event,
    GroupSynced,
    GroupSyncFailed,
    PublishFailed,
    Recounted,
    RequestServed,
    RoundCompleted,
    RoundFailed,
    Synced,
    SyncFailed,
    TransferProgress,
    VersionPublished,
)

__all__ = ["INSTRUMENTS", "Instrument", "Measurement", "measurements", "scalars"]

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "bytes", "ratio"]
Section = Literal["versions", "publishing", "syncing", "engines", "groups", "LoCo rounds", "servers", "the exporter"]
Labels = tuple[str, ...]
Value = str | Callable[[Any], float | None]  # a field of the event; or a function of it, None: nothing to record

LOCATION, PER_ERROR = ("location",), ("location", "retryable")  # what a metric is split by

# Upper bounds of histograms, in seconds: from a pause on a GPU to the upload of an anchor.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# The values of labels that are known ahead. With them, a counter is exported as 0 before it first counts, without which
# Prometheus does not see its first increase.
LABEL_VALUES = {"retryable": ("true", "false"), "cache": ("hit", "miss", "none")}


@dataclass(frozen=True)
class Instrument:
    """A metric.

    Args:
        section: What part of a process it is about.
        base: Its name without unit and suffix.
        kind: Whether it counts, is replaced, or is spread over buckets.
        unit: Of its value.
        help: One sentence on what it is.
        sources: The events that it is made of, and what of each. A metric without any is set by its process.
        labels: Fields of these events by which it is split.
    """

    section: Section
    base: str
    kind: Kind
    unit: Unit
    help: str
    sources: tuple[tuple[type[Event], Value], ...] = ()
    labels: Labels = LOCATION

    @property
    def name(self) -> str:
        """Its name in Prometheus, such as `pulse_fetched_bytes_total`."""
        return "_".join(filter(None, (self.base, self.unit, "total" if self.kind == "counter" else "")))

    @property
    def otel_name(self) -> str:
        """Its name in OpenTelemetry, such as `pulse.fetched`, which adds unit and suffix where they are shown."""
        return self.base.replace("_", ".", 1)

    @property
    def is_time(self) -> bool:
        """Whether its value is a point in time."""
        return self.base.endswith("_timestamp")


class Measurement(NamedTuple):
    """What an event adds to a metric."""

    instrument: Instrument
    value: float
    labels: dict[str, str]


def _one(_: Event) -> float:
    return 1.0


def _zero(_: Event) -> float:
    return 0.0


def _if_moved(field: str) -> Callable[[Synced], float | None]:
    """A field of a sync that went to another version; `watch` looks many times when there is none."""
    return lambda event: getattr(event, field) if event.path else None


def _lag(event: Synced | SyncFailed) -> float | None:
    if event.newest is None or event.version is None:
        return None
    return abs(event.newest - event.version)  # a pointer can have moved back, and the weights must follow it


def _ratio(event: VersionPublished) -> float | None:
    return event.changed / event.total if event.total else None


_HELP = {  # of each metric, by its base
    "pulse_newest_version": (
        "The newest version of the run that this process knows: published, found by a sync, or served."
    ),
    "pulse_version": "The version that the weights of this process, or of the engine that it updates, are at.",
    "pulse_step": "The trainer's step of the version that was last published or synced.",
    "pulse_lag_versions": "Versions between the newest one and the weights, when the last sync completed or failed.",
    "pulse_versions_published": "Versions committed to the store.",
    "pulse_published": "Bytes that versions added to the store, without anchors.",
    "pulse_full": "Bytes of all weights: what a version would take if it were sent whole.",
    "pulse_changed": "Share of weights that the last published version changed, from 0 to 1.",
    "pulse_coalesced_publishes": (
        "Calls of publish whose changes were committed with a later version, because the store was slower."
    ),
    "pulse_publish_blocked": "How long the caller of publish waited.",
    "pulse_publish_encode": "Time to compare and encode a version.",
    "pulse_publish_store": "Time to write a version to the store.",
    "pulse_publish_failures": "Versions that could not be committed; the next one contains their changes.",
    "pulse_last_publish_timestamp": "When a version was last committed, in seconds since 1970.",
    "pulse_anchors_published": "Anchors (full checkpoints) committed to the store.",
    "pulse_anchor": "Bytes of the anchors committed to the store.",
    "pulse_anchor_duration": "Time to write an anchor, in the background.",
    "pulse_syncs": "Syncs that completed; of those that found nothing new, at most one a second is counted.",
    "pulse_sync_fetch": "Time that a sync to another version waited for the store.",
    "pulse_sync_prepare": "Time that a sync to another version took to check and decode.",
    "pulse_sync_pause": (
        "Time that a sync to another version wrote weights: the only time in which they must not be used."
    ),
    "pulse_fetched": "Bytes that syncs fetched from the store.",
    "pulse_sync_replans": "Times that a sync found something missing or bad on its path and took another one.",
    "pulse_repaired_tensors": (
        "Tensors in which a recount found weights that something else had written, and that a sync repaired."
    ),
    "pulse_sync_failures": "Syncs that raised an error; retryable ones are expected to succeed when they are repeated.",
    "pulse_weights_torn": "1 while the weights are between two versions and must not be used, else 0.",
    "pulse_last_sync_timestamp": "When a sync last completed, with or without a new version, in seconds since 1970.",
    "pulse_recounts": "Times that the digest of all weights was counted anew.",
    "pulse_recount_mismatches": "Recounts that found other weights than those of the version.",
    "pulse_recount_duration": "Time to count the digest of all weights anew.",
    "pulse_last_recount_timestamp": (
        "When all weights were last counted and found equal to their version, in seconds since 1970."
    ),
    "pulse_transfer_done": "Bytes of the last long transfer, such as a first sync, that are done.",
    "pulse_transfer_size": "Bytes of the last long transfer in all.",
    "pulse_engine_updates": "Updates of an inference engine to another version, on all of its ranks.",
    "pulse_engine_update_failures": "Updates of an inference engine that failed.",
    "pulse_engine_pause": "Time in which an engine did not generate because of an update.",
    "pulse_engine_update_duration": "Time of an update of an engine, most of which it generates in.",
    "pulse_engine_fetched": "Bytes that all ranks of an engine fetched for its updates.",
    "pulse_group_version": "The version that the last group sync reached.",
    "pulse_group_syncs": "Group syncs that completed.",
    "pulse_group_sync_duration": "Time of a group sync.",
    "pulse_group_pause": "Time that a group sync wrote weights.",
    "pulse_group_sent": "Bytes sent in group syncs.",
    "pulse_group_received": "Bytes received in group syncs.",
    "pulse_group_sync_failures": "Group syncs that raised an error; the weights are unchanged.",
    "pulse_round": "The number of the last round that completed.",
    "pulse_rounds": "Rounds that completed.",
    "pulse_rounds_missed": "Rounds that completed without the update of this trainer.",
    "pulse_round_members": "Trainers whose updates the last round contains.",
    "pulse_round_duration": "Time of a round.",
    "pulse_round_sent": "Bytes sent in rounds.",
    "pulse_round_received": "Bytes received in rounds.",
    "pulse_round_failures": "Rounds that raised an error.",
    "pulse_requests": (
        "Requests answered; cache says whether a relay had all of what was asked for (none: not asked of a cache)."
    ),
    "pulse_request_duration": "Time from a request to the last byte of its answer.",
    "pulse_served": "Bytes of objects and listings sent to clients.",
    "pulse_store_failures": (
        "Requests that failed because the store behind the server failed; for a relay, its upstream."
    ),
    "pulse_store_up": "1 if the store behind the server answers, else 0: the same as /healthz.",
    "pulse_cache": "Bytes that the cache of a relay takes on disk.",
    "pulse_cache_limit": "Bytes that the cache of a relay is kept below.",
    "pulse_events_dropped": (
        "Events that are missing from these metrics, because they came faster than they could be counted."
    ),
}


def _metric(
    section: Section, base: str, kind: Kind, unit: Unit, *sources: tuple[type[Event], Value], labels: Labels = LOCATION
) -> Instrument:
    return Instrument(section, base, kind, unit, _HELP[base], sources, labels)


def _per_rank(base: str, kind: Kind, unit: Unit, event: type[Event], value: Value, *labels: str) -> Instrument:
    return _metric("groups", base, kind, unit, (event, value), labels=("rank", *labels))


def _per_fragment(base: str, kind: Kind, unit: Unit, event: type[Event], value: Value) -> Instrument:
    return _metric("LoCo rounds", base, kind, unit, (event, value), labels=("fragment",))


DROPPED = _metric("the exporter", "pulse_events_dropped", "counter", "", labels=())

INSTRUMENTS: tuple[Instrument, ...] = (
    _metric(
        "versions",
        "pulse_newest_version",
        "gauge",
        "",
        (VersionPublished, "version"),
        (Synced, "newest"),
        (SyncFailed, "newest"),
    ),
    _metric("versions", "pulse_version", "gauge", "", (Synced, "version"), (EngineUpdated, "version")),
    _metric(
        "versions", "pulse_step", "gauge", "", (VersionPublished, "step"), (Synced, "step"), (EngineUpdated, "step")
    ),
    _metric("versions", "pulse_lag_versions", "gauge", "", (Synced, _lag), (SyncFailed, _lag)),
    _metric("publishing", "pulse_versions_published", "counter", "", (VersionPublished, _one)),
    _metric("publishing", "pulse_published", "counter", "bytes", (VersionPublished, "payload_bytes")),
    _metric("publishing", "pulse_full", "gauge", "bytes", (VersionPublished, "full_bytes")),
    _metric("publishing", "pulse_changed", "gauge", "ratio", (VersionPublished, _ratio)),
    _metric("publishing", "pulse_coalesced_publishes", "counter", "", (VersionPublished, "coalesced")),
    _metric("publishing", "pulse_publish_blocked", "histogram", "seconds", (VersionPublished, "blocked_s")),
    _metric("publishing", "pulse_publish_encode", "histogram", "seconds", (VersionPublished, "encode_s")),
    _metric("publishing", "pulse_publish_store", "histogram", "seconds", (VersionPublished, "store_s")),
    _metric("publishing", "pulse_publish_failures", "counter", "", (PublishFailed, _one), labels=PER_ERROR),
    _metric("publishing", "pulse_last_publish_timestamp", "gauge", "seconds", (VersionPublished, "time_s")),
    _metric("publishing", "pulse_anchors_published", "counter", "", (AnchorPublished, _one)),
    _metric("publishing", "pulse_anchor", "counter", "bytes", (AnchorPublished, "payload_bytes")),
    _metric("publishing", "pulse_anchor_duration", "histogram", "seconds", (AnchorPublished, "seconds")),
    _metric("syncing", "pulse_syncs", "counter", "", (Synced, _one)),
    _metric("syncing", "pulse_sync_fetch", "histogram", "seconds", (Synced, _if_moved("fetch_s"))),
    _metric("syncing", "pulse_sync_prepare", "histogram", "seconds", (Synced, _if_moved("prepare_s"))),
    _metric("syncing", "pulse_sync_pause", "histogram", "seconds", (Synced, _if_moved("pause_s"))),
    _metric("syncing", "pulse_fetched", "counter", "bytes", (Synced, "fetched_bytes")),
    _metric("syncing", "pulse_sync_replans", "counter", "", (Synced, "replanned")),
    _metric("syncing", "pulse_repaired_tensors", "counter", "", (Synced, lambda event: len(event.repaired))),
    _metric("syncing", "pulse_sync_failures", "counter", "", (SyncFailed, _one), labels=PER_ERROR),
    _metric(
        "syncing",
        "pulse_weights_torn",
        "gauge",
        "",
        (SyncFailed, "torn"),
        (Synced, _zero),
        (EngineUpdateFailed, "torn"),
        (EngineUpdated, _zero),
    ),
    _metric("syncing", "pulse_last_sync_timestamp", "gauge", "seconds", (Synced, "time_s"), (EngineUpdated, "time_s")),
    _metric("syncing", "pulse_recounts", "counter", "", (Recounted, _one)),
    _metric("syncing", "pulse_recount_mismatches", "counter", "", (Recounted, lambda event: not event.equal)),
    _metric("syncing", "pulse_recount_duration", "histogram", "seconds", (Recounted, "seconds")),
    _metric(
        "syncing",
        "pulse_last_recount_timestamp",
        "gauge",
        "seconds",
        (Recounted, lambda event: event.time_s if event.equal else None),
    ),
    _metric("syncing", "pulse_transfer_done", "gauge", "bytes", (TransferProgress, "done_bytes")),
    _metric("syncing", "pulse_transfer_size", "gauge", "bytes", (TransferProgress, "total_bytes")),
    _metric("engines", "pulse_engine_updates", "counter", "", (EngineUpdated, _one)),
    _metric("engines", "pulse_engine_update_failures", "counter", "", (EngineUpdateFailed, _one), labels=PER_ERROR),
    _metric("engines", "pulse_engine_pause", "histogram", "seconds", (EngineUpdated, "pause_s")),
    _metric("engines", "pulse_engine_update_duration", "histogram", "seconds", (EngineUpdated, "seconds")),
    _metric("engines", "pulse_engine_fetched", "counter", "bytes", (EngineUpdated, "fetched_bytes")),
    _per_rank("pulse_group_version", "gauge", "", GroupSynced, "version"),
    _per_rank("pulse_group_syncs", "counter", "", GroupSynced, _one, "method"),
    _per_rank("pulse_group_sync_duration", "histogram", "seconds", GroupSynced, "seconds"),
    _per_rank("pulse_group_pause", "histogram", "seconds", GroupSynced, "pause_s"),
    _per_rank("pulse_group_sent", "counter", "bytes", GroupSynced, "sent_bytes"),
    _per_rank("pulse_group_received", "counter", "bytes", GroupSynced, "received_bytes"),
    _per_rank("pulse_group_sync_failures", "counter", "", GroupSyncFailed, _one),
    _per_fragment("pulse_round", "gauge", "", RoundCompleted, "round"),
    _per_fragment("pulse_rounds", "counter", "", RoundCompleted, _one),
    _per_fragment("pulse_rounds_missed", "counter", "", RoundCompleted, lambda event: not event.took_part),
    _per_fragment("pulse_round_members", "gauge", "", RoundCompleted, "members"),
    _per_fragment("pulse_round_duration", "histogram", "seconds", RoundCompleted, "seconds"),
    _per_fragment("pulse_round_sent", "counter", "bytes", RoundCompleted, "sent_bytes"),
    _per_fragment("pulse_round_received", "counter", "bytes", RoundCompleted, "received_bytes"),
    _per_fragment("pulse_round_failures", "counter", "", RoundFailed, _one),
    _metric(
        "servers",
        "pulse_requests",
        "counter",
        "",
        (RequestServed, _one),
        labels=("location", "method", "status", "cache"),
    ),
    _metric("servers", "pulse_request_duration", "histogram", "seconds", (RequestServed, "seconds")),
    _metric("servers", "pulse_served", "counter", "bytes", (RequestServed, "sent_bytes"), labels=("location", "cache")),
    _metric("servers", "pulse_store_failures", "counter", "", (RequestServed, "store_failed")),
    _metric("servers", "pulse_store_up", "gauge", ""),
    _metric("servers", "pulse_cache", "gauge", "bytes"),
    _metric("servers", "pulse_cache_limit", "gauge", "bytes"),
    DROPPED,
)
"""The table of all metrics."""


def _index() -> dict[type[Event], list[tuple[Instrument, Callable[[Any], float | None]]]]:
    index: dict[type[Event], list[tuple[Instrument, Callable[[Any], float | None]]]] = {}
    for instrument in INSTRUMENTS:
        for event, value in instrument.sources:
            read = value if callable(value) else attrgetter(value)
            index.setdefault(event, []).append((instrument, read))
    return index


_BY_EVENT = _index()  # the metrics that are made of each type of event


def measurements(event: Event) -> Iterator[Measurement]:
    """Yield what an event adds to each metric; nothing for an event that is not in the table."""
    for instrument, read in _BY_EVENT.get(type(event), ()):
        value = read(event)
        if value is not None:
            yield Measurement(instrument, float(value), {name: _label(event, name) for name in instrument.labels})


def _label(event: Event, name: str) -> str:
    value = getattr(event, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


def scalars(event: Event, prefix: str = "pulse/") -> dict[str, float]:
    """Return the numbers of an event by name, for an experiment tracker; none if the event has none to show.

    A counter becomes what this event adds to it: `pulse/fetched_bytes` is what this sync fetched.

    Args:
        event: As a listener receives it.
        prefix: Of the names.
    """
    found = {}
    for instrument, value, _ in measurements(event):
        is_count = any(read is _one for of, read in instrument.sources if of is type(event))
        if not instrument.is_time and not is_count:
            found[prefix + instrument.name.removeprefix("pulse_").removesuffix("_total")] = value
    return found
