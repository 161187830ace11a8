"""What `pulse serve` and `pulse relay` do: put a store together, say where it is served, and serve it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from pulsesync import server
from pulsesync.cli.options import Count, Flag, Json, UsageError, read_token
from pulsesync.errors import NotFoundError
from pulsesync.store import LocalStore, Store, open_store
from pulsesync.store.http import HttpStore

_SIZE = re.compile(r"(\d{1,15})\s?([KMGT]?)(i?)B?", re.ASCII | re.IGNORECASE)


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: Count = 8765,
    token_file: Path | None = None,
    token_in_clear: Flag = False,
    certificate: Path | None = None,
    private_key: Path | None = None,
    as_json: Json = False,
) -> int:
    """Serve a folder of runs over http, for workers on other machines to read.

    Symbolic links are followed only as far as they stay inside the folder.

    Args:
        folder: What to serve: a run, or a folder above several.
        host: The address to listen on; 0.0.0.0 for all of this machine.
        port: The port; 0 for any that is free.
        token_file: File with a token that readers must send; else PULSE_TOKEN, else none is required.
        token_in_clear: Permit that readers on other machines send the token without https.
        certificate: Certificate for https, in PEM.
        private_key: Its private key, in PEM.
        as_json: Print the address as one JSON object, for machines.

    Raises:
        UsageError: the token is empty, or would travel in clear; a certificate or its private key is missing.
        PulseError: there is no such folder, or it cannot be served.
    """
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder}", key=str(folder))
    token = read_token(token_file)
    try:
        server.serve(
            server.ServedFolder(folder),
            host,
            port,
            token=token,
            certificate=certificate,
            private_key=private_key,
            token_in_clear=token_in_clear,
            on_ready=_announcer("folder", str(folder), as_json),
        )
    except ValueError as e:
        raise UsageError(str(e)) from e
    return 0


def relay(
    upstream: str,
    *,
    cache: Path | None = None,
    max_cache: str | None = None,
    cafile: Path | None = None,
    upstream_token_file: Path | None = None,
    upstream_token_in_clear: Flag = False,
    host: str = "127.0.0.1",
    port: Count = 8765,
    token_file: Path | None = None,
    without_token: Flag = False,
    token_in_clear: Flag = False,
    certificate: Path | None = None,
    private_key: Path | None = None,
    as_json: Json = False,
) -> int:
    """Serve another location with a cache: the workers of a site fetch each byte from far away once.

    Args:
        upstream: What to serve: a bucket, or the address of another server.
        cache: Folder to keep bodies in; one in your cache folder if not given.
        max_cache: Keep it below this size, such as 500MB or 20GiB; half of the disk space that is free if not given.
            What was not used for longest is removed first.
        cafile: Certificates to trust upstream, instead of the system's.
        upstream_token_file: File with the token that the relay itself sends upstream; else PULSE_UPSTREAM_TOKEN.
        upstream_token_in_clear: Permit that the relay sends its token to another machine without https.
        host: The address to listen on; 0.0.0.0 for all of this machine.
        port: The port; 0 for any that is free.
        token_file: File with a token that readers must send to the relay; else PULSE_TOKEN, else none is required.
        without_token: Permit that everybody who can reach the relay reads what its upstream protects by a token.
        token_in_clear: Permit that readers on other machines send the token without https.
        certificate: Certificate for https, in PEM.
        private_key: Its private key, in PEM.
        as_json: Print the address as one JSON object, for machines.

    Raises:
        UsageError: it makes no sense as a place; a token is empty, or would travel in clear; what the upstream protects
            by a token would be open to everybody; or an option has no effect on this upstream.
        PulseError: it cannot be served.
    """
    token, upstream_token = read_token(token_file), read_token(upstream_token_file, "PULSE_UPSTREAM_TOKEN")
    is_http = upstream.startswith(("http://", "https://"))
    if not is_http and (upstream_token_file is not None or upstream_token_in_clear):
        raise UsageError(f"{upstream} is not the address of a server, so that no token can be sent to it")
    if cafile is not None and not upstream.startswith("https://"):
        raise UsageError(f"--cafile is for an upstream that begins with https://; {upstream} does not")
    if token is not None and without_token:
        raise UsageError("--without-token contradicts the token that readers must show; give one of the two")
    if is_http and upstream_token is not None and token is None and not without_token:
        raise UsageError(
            "the relay shows a token to its upstream and would serve what that protects to everybody who can reach the "
            "relay: give readers a token with --token-file or PULSE_TOKEN, or permit it with --without-token"
        )
    max_bytes = None if max_cache is None else parse_size(max_cache)
    try:
        far = _open(upstream, upstream_token, cafile, upstream_token_in_clear)
        server.serve(
            server.relay(far, cache or _default_cache(), max_bytes),
            host,
            port,
            token=token,
            certificate=certificate,
            private_key=private_key,
            token_in_clear=token_in_clear,
            on_ready=_announcer("upstream", upstream, as_json),
        )
    except ValueError as e:
        raise UsageError(str(e)) from e
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500MB (of 10^6) or 20GiB (of 2^30). Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size such as 500MB or 20GiB, which is a whole number and a unit")
    exponent = " KMGT".index(match[2].upper() or " ")
    return int(match[1]) * int((1024 if match[3] else 1000) ** exponent)


def _open(upstream: str, token: str | None, cafile: Path | None, token_in_clear: bool) -> Store:
    """Open the upstream of a relay, with a token of its own: that of the relay's clients is shown to nobody."""
    if not upstream.startswith(("http://", "https://")):
        store = open_store(upstream)
        return server.ServedFolder(store.folder) if isinstance(store, LocalStore) else store
    # Without retries: those who ask the relay have their own, and the two would multiply.
    return HttpStore(
        upstream, token, timeout_s=10, cafile=None if cafile is None else str(cafile), token_in_clear=token_in_clear
    )


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pulsesync"


def _announcer(kind: str, place: str, as_json: bool) -> Callable[[str], None]:
    def announce(url: str) -> None:
        print(json.dumps({"url": url, kind: place}) if as_json else f"serving {place} at {url}", flush=True)

    return announce
