"""The table of all metrics: what each is called, what it means, and which field of which event it is made of.

Everything that shows metrics is made from it: Prometheus, OpenTelemetry, `scalars` for experiment trackers, and the
list in docs/metrics.md. Labels have few values: a location, a rank, an outcome; never a version or a key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
Value = str | Callable[[Any], float | None]  # a field of the event; or a function of it, None: nothing to record

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
    labels: tuple[str, ...] = ("location",)

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


def _per_rank(
    base: str, kind: Kind, unit: Unit, help_: str, event: type[Event], value: Value, *labels: str
) -> Instrument:
    return Instrument("groups", base, kind, unit, help_, ((event, value),), ("rank", *labels))


def _per_fragment(base: str, kind: Kind, unit: Unit, help_: str, event: type[Event], value: Value) -> Instrument:
    return Instrument("LoCo rounds", base, kind, unit, help_, ((event, value),), ("fragment",))


DROPPED = Instrument(
    "the exporter",
    "pulse_events_dropped",
    "counter",
    "",
    "Events that are missing from these metrics, because they came faster than they could be counted.",
    labels=(),
)

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(
        "versions",
        "pulse_newest_version",
        "gauge",
        "",
        "The newest version of the run that this process knows: published, found by a sync, or served.",
        ((VersionPublished, "version"), (Synced, "newest"), (SyncFailed, "newest")),
    ),
    Instrument(
        "versions",
        "pulse_version",
        "gauge",
        "",
        "The version that the weights of this process, or of the engine that it updates, are at.",
        ((Synced, "version"), (EngineUpdated, "version")),
    ),
    Instrument(
        "versions",
        "pulse_step",
        "gauge",
        "",
        "The trainer's step of the version that was last published or synced.",
        ((VersionPublished, "step"), (Synced, "step"), (EngineUpdated, "step")),
    ),
    Instrument(
        "versions",
        "pulse_lag_versions",
        "gauge",
        "",
        "Versions between the newest one and the weights, when the last sync completed or failed.",
        ((Synced, _lag), (SyncFailed, _lag)),
    ),
    Instrument(
        "publishing",
        "pulse_versions_published",
        "counter",
        "",
        "Versions committed to the store.",
        ((VersionPublished, _one),),
    ),
    Instrument(
        "publishing",
        "pulse_published",
        "counter",
        "bytes",
        "Bytes that versions added to the store, without anchors.",
        ((VersionPublished, "payload_bytes"),),
    ),
    Instrument(
        "publishing",
        "pulse_full",
        "gauge",
        "bytes",
        "Bytes of all weights: what a version would take if it were sent whole.",
        ((VersionPublished, "full_bytes"),),
    ),
    Instrument(
        "publishing",
        "pulse_changed",
        "gauge",
        "ratio",
        "Share of weights that the last published version changed, from 0 to 1.",
        ((VersionPublished, _ratio),),
    ),
    Instrument(
        "publishing",
        "pulse_coalesced_publishes",
        "counter",
        "",
        "Calls of publish whose changes were committed with a later version, because the store was slower.",
        ((VersionPublished, "coalesced"),),
    ),
    Instrument(
        "publishing",
        "pulse_publish_blocked",
        "histogram",
        "seconds",
        "How long the caller of publish waited.",
        ((VersionPublished, "blocked_s"),),
    ),
    Instrument(
        "publishing",
        "pulse_publish_encode",
        "histogram",
        "seconds",
        "Time to compare and encode a version.",
        ((VersionPublished, "encode_s"),),
    ),
    Instrument(
        "publishing",
        "pulse_publish_store",
        "histogram",
        "seconds",
        "Time to write a version to the store.",
        ((VersionPublished, "store_s"),),
    ),
    Instrument(
        "publishing",
        "pulse_publish_failures",
        "counter",
        "",
        "Versions that could not be committed; the next one contains their changes.",
        ((PublishFailed, _one),),
        ("location", "retryable"),
    ),
    Instrument(
        "publishing",
        "pulse_last_publish_timestamp",
        "gauge",
        "seconds",
        "When a version was last committed, in seconds since 1970.",
        ((VersionPublished, "time_s"),),
    ),
    Instrument(
        "publishing",
        "pulse_anchors_published",
        "counter",
        "",
        "Anchors (full checkpoints) committed to the store.",
        ((AnchorPublished, _one),),
    ),
    Instrument(
        "publishing",
        "pulse_anchor",
        "counter",
        "bytes",
        "Bytes of the anchors committed to the store.",
        ((AnchorPublished, "payload_bytes"),),
    ),
    Instrument(
        "publishing",
        "pulse_anchor_duration",
        "histogram",
        "seconds",
        "Time to write an anchor, in the background.",
        ((AnchorPublished, "seconds"),),
    ),
    Instrument(
        "syncing",
        "pulse_syncs",
        "counter",
        "",
        "Syncs that completed; of those that found nothing new, at most one a second is counted.",
        ((Synced, _one),),
    ),
    Instrument(
        "syncing",
        "pulse_sync_fetch",
        "histogram",
        "seconds",
        "Time that a sync to another version waited for the store.",
        ((Synced, _if_moved("fetch_s")),),
    ),
    Instrument(
        "syncing",
        "pulse_sync_prepare",
        "histogram",
        "seconds",
        "Time that a sync to another version took to check and decode.",
        ((Synced, _if_moved("prepare_s")),),
    ),
    Instrument(
        "syncing",
        "pulse_sync_pause",
        "histogram",
        "seconds",
        "Time that a sync to another version wrote weights: the only time in which they must not be used.",
        ((Synced, _if_moved("pause_s")),),
    ),
    Instrument(
        "syncing",
        "pulse_fetched",
        "counter",
        "bytes",
        "Bytes that syncs fetched from the store.",
        ((Synced, "fetched_bytes"),),
    ),
    Instrument(
        "syncing",
        "pulse_sync_replans",
        "counter",
        "",
        "Times that a sync found something missing or bad on its path and took another one.",
        ((Synced, "replanned"),),
    ),
    Instrument(
        "syncing",
        "pulse_repaired_tensors",
        "counter",
        "",
        "Tensors in which a recount found weights that something else had written, and that a sync repaired.",
        ((Synced, lambda event: len(event.repaired)),),
    ),
    Instrument(
        "syncing",
        "pulse_sync_failures",
        "counter",
        "",
        "Syncs that raised an error; retryable ones are expected to succeed when they are repeated.",
        ((SyncFailed, _one),),
        ("location", "retryable"),
    ),
    Instrument(
        "syncing",
        "pulse_weights_torn",
        "gauge",
        "",
        "1 while the weights are between two versions and must not be used, else 0.",
        ((SyncFailed, "torn"), (Synced, _zero), (EngineUpdateFailed, "torn"), (EngineUpdated, _zero)),
    ),
    Instrument(
        "syncing",
        "pulse_last_sync_timestamp",
        "gauge",
        "seconds",
        "When a sync last completed, with or without a new version, in seconds since 1970.",
        ((Synced, "time_s"), (EngineUpdated, "time_s")),
    ),
    Instrument(
        "syncing",
        "pulse_recounts",
        "counter",
        "",
        "Times that the digest of all weights was counted anew.",
        ((Recounted, _one),),
    ),
    Instrument(
        "syncing",
        "pulse_recount_mismatches",
        "counter",
        "",
        "Recounts that found other weights than those of the version.",
        ((Recounted, lambda event: not event.equal),),
    ),
    Instrument(
        "syncing",
        "pulse_recount_duration",
        "histogram",
        "seconds",
        "Time to count the digest of all weights anew.",
        ((Recounted, "seconds"),),
    ),
    Instrument(
        "syncing",
        "pulse_last_recount_timestamp",
        "gauge",
        "seconds",
        "When all weights were last counted and found equal to their version, in seconds since 1970.",
        ((Recounted, lambda event: event.time_s if event.equal else None),),
    ),
    Instrument(
        "syncing",
        "pulse_transfer_done",
        "gauge",
        "bytes",
        "Bytes of the last long transfer, such as a first sync, that are done.",
        ((TransferProgress, "done_bytes"),),
    ),
    Instrument(
        "syncing",
        "pulse_transfer_size",
        "gauge",
        "bytes",
        "Bytes of the last long transfer in all.",
        ((TransferProgress, "total_bytes"),),
    ),
    Instrument(
        "engines",
        "pulse_engine_updates",
        "counter",
        "",
        "Updates of an inference engine to another version, on all of its ranks.",
        ((EngineUpdated, _one),),
    ),
    Instrument(
        "engines",
        "pulse_engine_update_failures",
        "counter",
        "",
        "Updates of an inference engine that failed.",
        ((EngineUpdateFailed, _one),),
        ("location", "retryable"),
    ),
    Instrument(
        "engines",
        "pulse_engine_pause",
        "histogram",
        "seconds",
        "Time in which an engine did not generate because of an update.",
        ((EngineUpdated, "pause_s"),),
    ),
    Instrument(
        "engines",
        "pulse_engine_update_duration",
        "histogram",
        "seconds",
        "Time of an update of an engine, most of which it generates in.",
        ((EngineUpdated, "seconds"),),
    ),
    Instrument(
        "engines",
        "pulse_engine_fetched",
        "counter",
        "bytes",
        "Bytes that all ranks of an engine fetched for its updates.",
        ((EngineUpdated, "fetched_bytes"),),
    ),
    _per_rank(
        "pulse_group_version", "gauge", "", "The version that the last group sync reached.", GroupSynced, "version"
    ),
    _per_rank("pulse_group_syncs", "counter", "", "Group syncs that completed.", GroupSynced, _one, "method"),
    _per_rank("pulse_group_sync_duration", "histogram", "seconds", "Time of a group sync.", GroupSynced, "seconds"),
    _per_rank(
        "pulse_group_pause", "histogram", "seconds", "Time that a group sync wrote weights.", GroupSynced, "pause_s"
    ),
    _per_rank("pulse_group_sent", "counter", "bytes", "Bytes sent in group syncs.", GroupSynced, "sent_bytes"),
    _per_rank(
        "pulse_group_received", "counter", "bytes", "Bytes received in group syncs.", GroupSynced, "received_bytes"
    ),
    _per_rank(
        "pulse_group_sync_failures",
        "counter",
        "",
        "Group syncs that raised an error; the weights are unchanged.",
        GroupSyncFailed,
        _one,
    ),
    _per_fragment("pulse_round", "gauge", "", "The number of the last round that completed.", RoundCompleted, "round"),
    _per_fragment("pulse_rounds", "counter", "", "Rounds that completed.", RoundCompleted, _one),
    _per_fragment(
        "pulse_rounds_missed",
        "counter",
        "",
        "Rounds that completed without the update of this trainer.",
        RoundCompleted,
        lambda event: not event.took_part,
    ),
    _per_fragment(
        "pulse_round_members", "gauge", "", "Trainers whose updates the last round contains.", RoundCompleted, "members"
    ),
    _per_fragment("pulse_round_duration", "histogram", "seconds", "Time of a round.", RoundCompleted, "seconds"),
    _per_fragment("pulse_round_sent", "counter", "bytes", "Bytes sent in rounds.", RoundCompleted, "sent_bytes"),
    _per_fragment(
        "pulse_round_received", "counter", "bytes", "Bytes received in rounds.", RoundCompleted, "received_bytes"
    ),
    _per_fragment("pulse_round_failures", "counter", "", "Rounds that raised an error.", RoundFailed, _one),
    Instrument(
        "servers",
        "pulse_requests",
        "counter",
        "",
        "Requests answered; cache says whether a relay had all of what was asked for (none: not asked of a cache).",
        ((RequestServed, _one),),
        ("location", "method", "status", "cache"),
    ),
    Instrument(
        "servers",
        "pulse_request_duration",
        "histogram",
        "seconds",
        "Time from a request to the last byte of its answer.",
        ((RequestServed, "seconds"),),
    ),
    Instrument(
        "servers",
        "pulse_served",
        "counter",
        "bytes",
        "Bytes of objects and listings sent to clients.",
        ((RequestServed, "sent_bytes"),),
        ("location", "cache"),
    ),
    Instrument(
        "servers",
        "pulse_store_failures",
        "counter",
        "",
        "Requests that failed because the store behind the server failed; for a relay, its upstream.",
        ((RequestServed, "store_failed"),),
    ),
    Instrument(
        "servers",
        "pulse_store_up",
        "gauge",
        "",
        "1 if the store behind the server answers, else 0: the same as /healthz.",
    ),
    Instrument("servers", "pulse_cache", "gauge", "bytes", "Bytes that the cache of a relay takes on disk."),
    Instrument("servers", "pulse_cache_limit", "gauge", "bytes", "Bytes that the cache of a relay is kept below."),
    DROPPED,
)
"""The table of all metrics."""


def _index() -> dict[type[Event], list[tuple[Instrument, Callable[[Any], float | None]]]]:
    """Return, for each type of event, the metrics that are made of it."""
    index: dict[type[Event], list[tuple[Instrument, Callable[[Any], float | None]]]] = {}
    for instrument in INSTRUMENTS:
        for event, value in instrument.sources:
            read = value if callable(value) else _reader(value)
            index.setdefault(event, []).append((instrument, read))
    return index


def _reader(field: str) -> Callable[[Any], float | None]:
    return lambda event: getattr(event, field)


_BY_EVENT = _index()


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
