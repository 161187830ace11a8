"""`pulse log`: list the versions of a run, with the anchors and squashed patches that lead to them."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pulsesync.cli import options
from pulsesync.cli.progress import show_progress
from pulsesync.errors import FormatError, PulseError
from pulsesync.maintain.verify import FoundRecord, find_records
from pulsesync.run import keys
from pulsesync.run.pointers import read_pointers
from pulsesync.run.reader import RunReader, describe


def log(
    run: str,
    *,
    trust: options.Trust = None,
    trust_pointers: options.TrustPointers = None,
    limit: options.Count = 50,
    as_json: options.Json = False,
) -> int:
    """List the versions of a run, the newest first, with the anchors and squashed patches that lead to them.

    Args:
        run: The run to list.
        trust: Public key of a publisher to trust, or a file of such keys.
        trust_pointers: Public key that may move pointers and nothing else, or a file of such keys; it needs --trust.
        limit: Versions to show; 0 for all.
        as_json: Print one JSON object for each record, for machines.

    Raises:
        NothingThereError: there is no run, or no version in it yet.
        FormatError: none of its records can be read; PulseError: the store does not answer, or no trusted key signed
            the newest version.
    """
    store, (trusted, movers) = options.open_place(run), options.read_keys(trust, trust_pointers)
    with show_progress(as_json) as bars:
        found = find_records(RunReader(store, trusted), limit or None, bars.report)[::-1]
    if not found:
        raise options.NothingThereError(options.no_run(run))
    if not any(one.record for one in found):
        first = found[0]
        raise FormatError(f"{run}: {len(found)} records were read, all of them bad; {first.key}: {first.fault}")
    pointed: defaultdict[str, list[str]] = defaultdict(list)  # the names of pointers, by the key of their version
    with suppress(PulseError):  # `pulse verify` reports why pointers cannot be read
        for name, pointer in read_pointers(store, trust=trusted, trust_pointers=movers).items():
            pointed[keys.manifest_key(pointer.version)].append(name)
    if as_json:
        for one in found:
            facts = describe(one.record) if one.record else {"fault": one.fault}
            print(json.dumps({"key": one.key, **facts, "pointers": pointed.get(one.key, [])}))
        return 0
    marks = ({"pointers": " ".join(pointed.get(one.key, []))} if pointed else {} for one in found if one.record)
    options.Printer(False).table({**row, **mark} for row, mark in zip(rows(found), marks, strict=True))
    for one in found:
        if one.fault:
            print(f"{one.key}: {one.fault}")
    return 0


def rows(found: list[FoundRecord]) -> Iterator[dict[str, Any]]:
    """Yield a row for people for each record; those that cannot be read are left out."""
    for record in (one.record for one in found):
        if record is not None:
            facts = describe(record)
            yield {
                "version": record.version,
                "kind": facts["kind"],
                "from": facts["base"],
                "step": f"{record.step} (back)" if record.rewound_at == record.version else record.step,
                "epoch": record.epoch,
                "patch": record.index,  # a column of its own: 0.10 would look like less than 0.9
                "bytes": f"{record.size_bytes:,}",
                "time (UTC)": utc(record.created),
                "digest": record.digest[:12],
            }


def utc(created: int) -> str:
    """Format seconds since 1970 as a date and a time."""
    try:
        return f"{datetime.fromtimestamp(created, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # no calendar has it: the writer's clock was wrong
        return f"{created} s after 1970"
