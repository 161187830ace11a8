"""A run over HTTP: any store, served for reading. Needs `pip install 'pulsesync[serve]'`.

    serve(ServedFolder("run"))                                  what `pulse serve` does
    serve(relay(HttpStore("https://trainer:8765"), "cache"))    what `pulse relay` does

Plain GET and HEAD with ranges, so that any cache or content delivery network can be used in between, and one addition:
`/?list=` with a prefix lists the objects below it, one JSON object a line; with `&after=` and a key, a page of those
after that key. Content-addressed objects may be cached forever; all others must be requested again each time; that an
object is missing is never cached. The one thing that clients may write is the heartbeat of a worker: it is kept only in
memory, and a relay sends it to its upstream.

Memory is bounded: a limited number of requests is answered at a time, each with a few pieces of its object in memory.
Objects are served unaltered. A relay hashes those that it fetches entirely; readers check everything.
"""

import os
import shutil
from pathlib import Path

from pulsesync.core.scratch import nearest
from pulsesync.server.service import make_app
from pulsesync.server.serving import serve
from pulsesync.store.base import Store
from pulsesync.store.cache import MAX_BYTES, CachedStore
from pulsesync.store.cache_folder import folder_bytes
from pulsesync.store.coalesce import CoalescingStore
from pulsesync.store.local import ServedFolder

__all__ = ["ServedFolder", "make_app", "relay", "serve"]


def relay(upstream: Store, folder: str | os.PathLike[str], max_bytes: int | None = None) -> Store:
    """Return a store for `serve` that many clients may poll: it asks the upstream once a second, and once a body.

    Bodies are kept in a folder; while the upstream does not answer, they are still served. They are fetched in pieces,
    so an upstream over HTTP should support range requests: one that does not sends each body from its start.

    Args:
        upstream: What to serve.
        folder: Where bodies are kept; created if it does not exist.
        max_bytes: The folder is kept below this size by removing what was not used for longest. If it is not given, the
            limit is half of the free disk space, so that clients cannot fill the disk.
    """
    return CoalescingStore(
        CachedStore(upstream, folder, _half_of_the_disk(Path(folder)) if max_bytes is None else max_bytes)
    )


def _half_of_the_disk(folder: Path) -> int:
    """Return half of the disk space that is free for a folder, counting what it takes already as free."""
    try:
        return (shutil.disk_usage(nearest(folder)).free + folder_bytes(folder)) // 2
    except OSError:  # then nothing can be kept there either
        return MAX_BYTES
