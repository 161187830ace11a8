"""A run over HTTP: any store, served for reading. Needs `pip install 'pulsesync[serve]'`.

    serve(LocalStore("run"))                                    what `pulse serve` does
    serve(relay(HttpStore("https://trainer:8765"), "cache"))    what `pulse relay` does

Plain GET and HEAD with ranges, so that any cache or content network can stand in between, and one addition: `/?list=`
and a prefix gives the objects below it, one JSON object a line. Content-addressed objects may be cached for ever; the
rest must be asked for again each time; that something is not there is never cached.

Memory is bounded: only so many requests are worked on at a time, each with a few pieces of its object in memory. What a
store says goes out unaltered and unchecked; readers check everything.
"""

import os

from pulsesync.server.service import make_app
from pulsesync.server.serving import serve
from pulsesync.store.base import Store
from pulsesync.store.cache import CachedStore
from pulsesync.store.coalesce import Coalescing

__all__ = ["make_app", "relay", "serve"]


def relay(upstream: Store, folder: str | os.PathLike[str], max_bytes: int | None = None) -> Store:
    """Return a store for `serve` that many may poll: it asks the upstream once a second, and for each body once.

    Bodies are kept in a folder, up to max_bytes of them; while the upstream is away they are still served. They are
    fetched in pieces, so an upstream over HTTP should know range requests: one that does not sends each from its start.
    """
    return Coalescing(CachedStore(upstream, folder, max_bytes))
