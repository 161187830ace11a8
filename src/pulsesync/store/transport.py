"""Requests to one web server, with connections that are kept open, a token, TLS, and an end to every wait.

HttpStore and the clients of inference engines send theirs through it. Redirects are not followed: a token goes to the
address that it was given for, and nowhere else.
"""

import http.client
import io
import ipaddress
import re
import ssl
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from pulsesync.core.arguments import shown
from pulsesync.core.location import ParsedLocation, redacted
from pulsesync.errors import StoreError
from pulsesync.store.deadlines import PIECE_BYTES, Connection, Deadline, Response

_TOKEN = re.compile(r"[!-~]+")
ENDLESS_TIMEOUTS = 10  # the time limit of an answer that may be endless, as a multiple of timeout_s


def clean_token(token: str, what: str = "token") -> str:
    """Return a token without the white space around it, such as the newline at the end of a file or of a secret.

    Raises: TypeError, ValueError, if it cannot be sent as a bearer token; the error does not show it.
    """
    if not isinstance(token, str):
        raise TypeError(f"the {what} must be a text; got a value of type {type(token).__name__}")
    token = token.strip()
    if not token:
        raise ValueError(f"the {what} is empty; pass a {what}, or None to run without authentication")
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"a {what} must be printable ASCII characters without spaces; this one has others")
    return token


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine by its own name or address: localhost, 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def parse_server(url: str | ParsedLocation) -> ParsedLocation:
    """Parse the address of a server. Raises: ValueError, if it is not an http or https address."""
    text = str(url) if isinstance(url, str | ParsedLocation) else None
    if text is None or not text.lower().startswith(("http://", "https://")):
        found = url if text is None else redacted(text)
        raise ValueError(f"url must be the address of a server, such as https://host/path; got {shown(found)}")
    return ParsedLocation.parse(url)


def is_in_clear(at: ParsedLocation) -> bool:
    """Return whether what is sent to a server can be read on the network: it is another machine, without TLS."""
    return at.scheme == "http" and not is_loopback(_host_and_port(at)[0])


def _host_and_port(at: ParsedLocation) -> tuple[str, int]:
    host, _, port = at.authority.rpartition(":")
    return host.strip("[]"), int(port)


class HttpTransport:
    """Sends requests below an address. It is shared by all threads.

    Args:
        at: The address.
        token: Sent as a bearer token with every request.
        timeout_s: Limit for connecting, for the TLS handshake, for the headers of an answer, and for every `timeout_s *
            min_bytes_per_s` bytes of a body.
        cafile: Certificates to trust instead of the system's.
        min_bytes_per_s: See above.

    Raises:
        StoreError: the certificates of cafile cannot be read.
    """

    def __init__(
        self, at: ParsedLocation, token: str | None, timeout_s: float, cafile: str | None, min_bytes_per_s: float
    ) -> None:
        (self._host, self._port), self._path = _host_and_port(at), at.url_path
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s, self._min_bytes_per_s = timeout_s, min_bytes_per_s
        self._tls = _trust(cafile) if at.scheme == "https" else None
        self._idle: list[Connection] = []  # append and pop are atomic: no lock
        weakref.finalize(self, _close, self._idle)

    @property
    def has_token(self) -> bool:
        """Whether a token is sent with every request."""
        return bool(self._headers)

    def close(self) -> None:
        """Close the idle connections; the transport can still be used."""
        _close(self._idle)

    @contextmanager
    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Iterator[Response]:
        """Yield the answer to a request, whatever its status; keep the connection if all of it was read.

        Raises: OSError, http.client.HTTPException, if there is no answer, or it ended early or took too long.
        """
        connection, response = self._send(method, path, headers, body)
        try:
            yield response
        finally:
            keep = _is_done(response) and method != "POST"  # for which none would be taken: they would pile up
            response.close()
            self._idle.append(connection) if keep else connection.close()

    def _send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[Connection, Response]:
        """Send a request over a kept connection, or, if the server has closed that, over a new one.

        A POST is sent over a new one: repeated after a connection broke, it could be executed twice.
        """
        kept = method != "POST"
        while True:
            kept, connection = self._connection(kept)
            try:
                connection.clock.start()
                connection.request(method, self._path + path, body, {**self._headers, **headers})
                response = connection.getresponse()
                assert isinstance(response, Response)
                connection.clock.start()  # for the body
                return connection, response
            except (ConnectionError, ssl.SSLEOFError):  # RemoteDisconnected is one
                connection.close()
                if not kept:
                    raise  # only a kept connection may have been closed long ago; this is a new one
                _close(self._idle)  # the others are as old, and each may take timeout_s to fail
                kept = False
            except BaseException:
                connection.close()
                raise

    def _connection(self, keep: bool) -> tuple[bool, Connection]:
        """Return a kept connection if there is one and `keep` is set, or a new one; and whether it was kept."""
        if keep:
            with suppress(IndexError):
                return True, self._idle.pop()
        clock = Deadline(self._timeout_s, self._min_bytes_per_s)
        return False, Connection(self._host, self._port, clock, self._tls)


def limit_time(response: Response) -> None:
    """Limit the time of an answer that does not state its length, however fast it is sent."""
    response.clock.limit(ENDLESS_TIMEOUTS * response.clock.timeout_s)


def skip(response: http.client.HTTPResponse, count: int, key: str) -> int:
    """Read and discard bytes of an answer; return how many there were."""
    skipped = 0
    while skipped < count and (piece := _piece(response, count - skipped, key)):
        skipped += len(piece)
    return skipped


def read(response: http.client.HTTPResponse, limit: int, key: str, exactly: bool = False) -> bytes:
    """Read an answer to its end or to a limit, whichever is first. exactly: it must reach the limit.

    Raises: StoreError, which is retryable, if the connection was closed early.
    """
    data = io.BytesIO()  # returns its bytes without a copy
    while piece := _piece(response, limit - data.tell(), key):
        data.write(piece)
    if exactly and data.tell() != limit:
        raise StoreError(
            f"the connection was closed after {data.tell()} of {limit} bytes of {key}", key=key, retryable=True
        )
    return data.getvalue()


def _piece(response: http.client.HTTPResponse, limit: int, key: str) -> bytes:
    """Return the next bytes of an answer, at most limit; none at the limit and at the end."""
    # Not read(): a chunk whose size is −1 makes it read to the end of the connection, without a limit.
    piece = response.read1(min(PIECE_BYTES, limit)) if limit > 0 else b""
    if not piece and limit > 0 and response.length:
        raise StoreError(
            f"the connection was closed {response.length} bytes before the end of {key}", key=key, retryable=True
        )
    return piece[:limit]


def _is_done(response: http.client.HTTPResponse) -> bool:
    """Return whether a connection is at the end of this answer and can be used for another request."""
    at_end = response.length == 0 or (response.length is None and response.isclosed())
    return at_end and not response.will_close


def _trust(cafile: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cafile)
    except OSError as e:  # ssl.SSLError is one
        raise StoreError(f"cannot read certificates from {cafile}: {e}; give a file in PEM format") from e


def _close(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()
