"""`pulse serve` and `pulse relay`: open a store, print the address, and serve it."""

import json
import os
import re
from functools import partial
from pathlib import Path

from pulsesync import server
from pulsesync.cli.options import Count, Flag, Json, UsageError, read_token
from pulsesync.core.location import ParsedLocation
from pulsesync.errors import NotFoundError
from pulsesync.store import LocalStore, Store, open_store
from pulsesync.store.http import HttpStore
from pulsesync.store.tokens import find_token

_SIZE = re.compile(r"(\d{1,15})\s?([KMGT]?)(i?)B?", re.ASCII | re.IGNORECASE)


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: Count = 8765,
    token_file: Path | None = None,
    token_in_clear: Flag = False,
    open_metrics: Flag = False,
    certificate: Path | None = None,
    private_key: Path | None = None,
    as_json: Json = False,
) -> int:
    """Serve a folder of runs over http, for workers on other machines to read.

    Symbolic links are followed only if they stay inside the folder.

    Args:
        folder: What to serve: a run, or a folder above several.
        host: The address to listen on; 0.0.0.0 for all addresses of this machine.
        port: The port to listen on; 0 for any free port.
        token_file: File with a token that readers must send. If not given, the token is that of PULSE_TOKEN; without
            that, none is required. Readers send it if their PULSE_SEND_TOKENS names this server.
        token_in_clear: Permit that readers on other machines send the token without https.
        open_metrics: Answer /metrics without the token.
        certificate: Certificate for https, in PEM.
        private_key: The certificate's private key, in PEM.
        as_json: Print the address as one JSON object, for machines.

    Raises:
        UsageError: the token is empty, or would be sent unencrypted; a certificate or its private key is missing.
        PulseError: there is no such folder, or it cannot be served.
    """
    if not folder.is_dir():
        raise NotFoundError(f"cannot serve {folder}: there is no such folder", key=str(folder))
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
            open_metrics=open_metrics,
            on_ready=partial(_announce, "folder", str(folder), as_json),
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
    open_metrics: Flag = False,
    certificate: Path | None = None,
    private_key: Path | None = None,
    as_json: Json = False,
) -> int:
    """Serve another location through a cache, so that a site fetches each byte from far away only once.

    Args:
        upstream: What to serve: a bucket, or the address of another server.
        cache: Folder in which fetched bytes are kept; a folder in your cache folder if not given.
        max_cache: Keep the cache below this size, such as 500MB or 20GiB; half of the free disk space if not given.
            What was not used for longest is removed first.
        cafile: Certificates to trust upstream, instead of the system's.
        upstream_token_file: File with the token that the relay itself sends upstream; if not given, the token of
            PULSE_UPSTREAM_TOKEN, or that of PULSE_SEND_TOKENS for the upstream.
        upstream_token_in_clear: Permit that the relay sends its token to another machine without https.
        host: The address to listen on; 0.0.0.0 for all addresses of this machine.
        port: The port to listen on; 0 for any free port.
        token_file: File with a token that readers must send to the relay. If not given, the token is that of
            PULSE_TOKEN; without that, none is required.
        without_token: Permit that all who can reach the relay read what its upstream protects with a token.
        token_in_clear: Permit that readers on other machines send the token without https.
        open_metrics: Answer /metrics without the token.
        certificate: Certificate for https, in PEM.
        private_key: The certificate's private key, in PEM.
        as_json: Print the address as one JSON object, for machines.

    Raises:
        UsageError: the upstream is not a location; a token is empty, or would be sent unencrypted; readers without a
            token could read what the upstream protects with one; or an option has no effect on this upstream.
        PulseError: the upstream cannot be served.
    """
    token, upstream_token = read_token(token_file), read_token(upstream_token_file, "PULSE_UPSTREAM_TOKEN")
    try:
        at = ParsedLocation.parse(upstream)
        is_http = at.scheme in ("http", "https")
        if is_http and upstream_token is None:
            upstream_token = find_token(at)
    except ValueError as e:
        raise UsageError(str(e)) from e
    if not is_http and (upstream_token_file is not None or upstream_token_in_clear):
        raise UsageError(
            f"an upstream token works with an http:// or https:// upstream only; got {upstream}: leave the token out"
        )
    if cafile is not None and at.scheme != "https":
        raise UsageError(f"--cafile works with an https:// upstream only; got {upstream}: leave --cafile out")
    _check_tokens(token, upstream_token if is_http else None, without_token)
    max_bytes = None if max_cache is None else parse_size(max_cache)
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pulsesync"
    try:
        far = _open(at, upstream_token, cafile, upstream_token_in_clear)
        server.serve(
            server.relay(far, folder, max_bytes),
            host,
            port,
            token=token,
            certificate=certificate,
            private_key=private_key,
            token_in_clear=token_in_clear,
            open_metrics=open_metrics,
            on_ready=partial(_announce, "upstream", upstream, as_json),
        )
    except ValueError as e:
        raise UsageError(str(e)) from e
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500MB (10^6 bytes each) or 20GiB (2^30 bytes each). Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"a size must be a whole number and a unit, such as 500MB or 20GiB; got {text!r}")
    exponent = " KMGT".index(match[2].upper() or " ")
    return int(match[1]) * int((1024 if match[3] else 1000) ** exponent)


def _open(upstream: ParsedLocation, token: str | None, cafile: Path | None, token_in_clear: bool) -> Store:
    """Open the upstream of a relay with the relay's own token; the token of its clients is never sent on."""
    if upstream.scheme not in ("http", "https"):
        store = open_store(upstream)
        return server.ServedFolder(store.folder) if isinstance(store, LocalStore) else store
    # Without retries: the clients of the relay retry themselves, and the two would multiply.
    return HttpStore(
        upstream, token, timeout_s=10, cafile=None if cafile is None else str(cafile), token_in_clear=token_in_clear
    )


def _check_tokens(token: str | None, upstream_token: str | None, without_token: bool) -> None:
    """Raises: UsageError, if readers without a token could read what the upstream protects with one."""
    if token is not None and without_token:
        raise UsageError(
            "--without-token contradicts the token of --token-file or PULSE_TOKEN: leave out one of the two"
        )
    if upstream_token is not None and token is None and not without_token:
        raise UsageError(
            "the upstream requires a token, and the relay would serve its content to all readers without one: require "
            "a token of readers with --token-file or PULSE_TOKEN, or permit this with --without-token"
        )


def _announce(kind: str, place: str, as_json: bool, url: str) -> None:
    print(json.dumps({"url": url, kind: place}) if as_json else f"serving {place} at {url}", flush=True)
