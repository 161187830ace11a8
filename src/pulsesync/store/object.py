"""S3, Google Cloud Storage and Azure Blob Storage as a store, through obstore.

Credentials, region and endpoint come from the variables that each cloud's own tools read (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, …), for S3 from the profiles in
`~/.aws/credentials` and `~/.aws/config` too (see aws.py), or as keywords of the constructor; never in the URL, which
ends up in logs.

A large object is uploaded in pieces. A process that dies meanwhile leaves pieces that no listing shows and that the
bucket's owner pays for: give the bucket a rule that aborts incomplete uploads after a day.
"""

import html
import os
import re
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pulsesync.core.extras import needed_for
from pulsesync.core.location import ParsedLocation
from pulsesync.errors import ConflictError, MissingBucketError, NotFoundError, PulseError, StoreError
from pulsesync.store.aws import ENDPOINT_VARIABLES, find_credentials
from pulsesync.store.base import MAX_ENTRIES, ObjectEntry, refused, too_many, too_slow, unreachable
from pulsesync.store.keys import check_key, check_prefix

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig
    from obstore.store import ObjectStore as _AnyStore

T = TypeVar("T")

_PIECE_BYTES = 8 << 20
_PIECES_AT_ONCE = 4
_CLIENT: "ClientConfig" = {
    "allow_http": True,  # takes effect only for an endpoint that begins with http://
    # obstore's limit of 30 s for a request would fail every large part on a slow link. A dead link is detected because
    # nothing is received; during an upload nothing is received until its last byte is sent, so a piece has a minute.
    "timeout": "15min",
    "read_timeout": "60s",
}
_PAGE = 1000  # objects of a listing that are taken at once: a page of S3
_LISTING_S = 600.0  # limit for a listing: a server can send pages without end, and empty ones, too
_MAX_CHARACTERS = 1 << 28  # of all keys of a listing
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z' -]*)?)")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_METADATA = re.compile(r"Error performing \w+ \S+/latest/(?:api/token|meta-data/)")
_MESSAGE_CHARACTERS = 300
_PASSING_KINDS = {"Connect", "Request", "Timeout", "Interrupted", "Decode"}
# The first: two conditional writes conflicted, and perhaps neither succeeded. The second: S3's 400 for a slow sender.
_PASSING_CODES = {"ConditionalRequestConflict", "RequestTimeout"}
_NO_BUCKET_CODES = {"NoSuchBucket", "ContainerNotFound"}


class ObjectStore:
    """Objects of a bucket below a prefix: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`.

    Calls are made once, and errors state whether they can be repeated: wrap the store in a RetryStore, as `open_store`
    does. A process forked from one that has made a call cannot make any: start processes with spawn.

    Args:
        url: The bucket and the prefix.
        **options: obstore's settings: `endpoint`, `access_key_id`, `region`, ….

    Raises:
        ValueError: the URL has a query or no bucket, this cloud does not have an option, or an AWS profile gives no
            credentials.
    """

    def __init__(self, url: str | ParsedLocation, **options: Any) -> None:
        with needed_for("s3://, gs:// and az://"):
            from obstore.exceptions import BaseError
            from obstore.store import from_url

        given = (*options.values(), *(options.get("config") or {}).values())
        at = ParsedLocation.parse(url)
        if at.scheme not in ("s3", "gs", "az"):
            raise ValueError(f"the URL of an object store must begin with s3://, gs:// or az://; got {at}")
        _check_no_user(*given, *(os.environ.get(name) for name in ENDPOINT_VARIABLES))
        client: ClientConfig = {**_CLIENT, **options.pop("client_options", {})}
        self.url = str(at)
        try:
            self._credentials = find_credentials(options) if at.scheme == "s3" else None
            if self._credentials:
                _check_no_user(*self._credentials.options.values())
                options |= self._credentials.options
            self._store = from_url(at.url, client_options=client, retry_config={"max_retries": 0}, **options)
        except (BaseError, ValueError) as e:
            raise ValueError(f"cannot open {at}: {_said(e)}") from e
        self._has_credentials = self._credentials is not None and not self._credentials.from_metadata

    @property
    def credentials_from(self) -> str:
        """Where the credentials come from, for people; never a secret."""
        if self._credentials is not None:
            return self._credentials.source
        cloud = "GOOGLE_" if self.url.startswith("gs://") else "AZURE_"
        names = sorted(name for name in os.environ if name.startswith(cloud))
        return ", ".join(names) or f"where obstore looks for them: no variable {cloud}… is set"

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        with self._translated(key, "read"):
            if end is not None and end <= begin:
                self._store.head(key)  # no cloud serves an empty range; this raises if the object is missing
                return b""
            try:
                if end is not None:
                    return _collect(self._store.get(key, options={"range": (begin, end)}), end - begin, key)
                return bytes(self._store.get(key, options={"range": {"offset": begin}} if begin else None).bytes())
            except Exception as e:
                if _status(e) == 416:  # the object ends before the range begins
                    return b""
                raise

    def size(self, key: str) -> int:
        check_key(key)
        with self._translated(key, "read"):
            return int(self._store.head(key)["size"])

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        with self._translated(key, "write"):
            view = memoryview(data).cast("B")
            self._store.put(key, view, chunk_size=_PIECE_BYTES, max_concurrency=_PIECES_AT_ONCE)

    def create(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._translated(key, "create"):
            self._store.put(key, data, mode="create")

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        check_prefix(prefix)
        with self._translated(prefix, "list"):
            found = _end_within(_LISTING_S, _entries(self._store, prefix, self.url), prefix, self.url)
        return iter(sorted(found, key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._translated(key, "delete"):
            try:
                self._store.delete(key)
            except FileNotFoundError:  # raised by all clouds but S3
                return

    @contextmanager
    def _translated(self, key: str, verb: str) -> Iterator[None]:
        """Translate the exceptions of obstore, its own and Python's, into the errors of a store."""
        _check_process()
        try:
            yield
        except PulseError:
            raise
        except Exception as e:  # obstore may raise anything
            what = f"{verb} {key} in {self.url}"
            if self._credentials is not None and not self._has_credentials and _is_about_metadata(e):
                # Outside EC2 the metadata service never answers, so a retry helps only if it gave credentials before.
                said = self._credentials.missing(_status_text(e) or "no answer")
                retryable = _status(e) is not None and _is_passing(e)
                raise StoreError(f"cannot {what}: {said}", key=key, retryable=retryable) from e
            self._has_credentials |= not _is_about_metadata(e)
            raise _store_error(e, what, key, self.url, self.credentials_from) from e
        self._has_credentials = True


def _check_no_user(*addresses: object) -> None:
    """Raises: ValueError, if one of these is an address with a user, a password or a query, which logs would show."""
    for address in addresses:
        if not isinstance(address, str) or "://" not in address:
            continue
        if "@" in urlsplit(address).netloc or "?" in address or "#" in address:
            raise ValueError(
                "the address of a store's endpoint must not contain a user, a password or a query; pass credentials as "
                "keywords, such as access_key_id= and secret_access_key=, or as environment variables"
            )


_process: int | None = None  # the process that made the first call


def _check_process() -> None:
    """Raises: StoreError, in a forked process: it lacks obstore's threads, and a call would wait for them forever."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise StoreError(
            "a forked process cannot use an object store that its parent has used; start the process with 'spawn'"
        )


async def _entries(store: "_AnyStore", prefix: str, url: str) -> list[ObjectEntry]:
    """Return the objects below a prefix. Raises: LimitError, if there are too many."""
    found: list[ObjectEntry] = []
    characters = 0
    async for some in store.list(prefix, chunk_size=_PAGE):
        for one in some:
            found.append(ObjectEntry(one["path"], one["size"], one["last_modified"].timestamp()))
            characters += len(one["path"])
        if len(found) > MAX_ENTRIES or characters > _MAX_CHARACTERS:
            raise too_many(f"{MAX_ENTRIES:,} objects or {_MAX_CHARACTERS:,} characters", prefix, url)
    return found


def _end_within(seconds: float, work: Coroutine[Any, Any, T], prefix: str, url: str) -> T:
    """Run a coroutine in a thread of its own, and give it up after some time: a blocking call of obstore cannot be.

    Raises: LimitError, if it did not end in time; what else it raises.
    """
    import asyncio

    ended: Future[T] = Future()

    async def limited() -> T:
        async with asyncio.timeout(seconds):
            return await work

    def run() -> None:
        try:
            ended.set_result(asyncio.run(limited()))
        except BaseException as e:  # noqa: BLE001 - raised in the thread that waits
            ended.set_exception(e)

    threading.Thread(target=run, name="pulse-listing", daemon=True).start()
    try:
        return ended.result()
    except TimeoutError as e:
        raise too_slow(prefix, url, seconds) from e


def _collect(result: "GetResult", limit: int, key: str) -> bytes:
    """Return the content. Raises: StoreError, as soon as it is too long: obstore itself accepts any length."""
    content, size = [], 0
    for chunk in result:
        size += len(chunk)
        if size > limit:
            raise StoreError(f"the store sent more than the {limit} bytes of {key} that were requested", key=key)
        content.append(chunk)
    return b"".join(content)


def _is_about_metadata(error: Exception) -> bool:
    """Return whether the request that failed was the one for the credentials of an EC2 instance."""
    return _METADATA.search(str(error)) is not None


def _store_error(error: Exception, what: str, key: str, url: str, credentials_from: str) -> StoreError:
    from obstore.exceptions import AlreadyExistsError

    code = _CODE.search(str(error))
    if code and code[1] in _PASSING_CODES:
        return StoreError(f"cannot {what}: {_said(error)}", key=key, retryable=True).advise("Try again")
    if isinstance(error, AlreadyExistsError):
        return ConflictError(f"cannot {what}: it exists already", key=key)
    no_bucket = code is not None and code[1] in _NO_BUCKET_CODES
    if isinstance(error, FileNotFoundError) and not no_bucket:
        return NotFoundError(f"cannot {what}: there is no such object", key=key)
    if no_bucket:
        missing = MissingBucketError(f"cannot {what}: {_said(error)}", key=key)
        return missing.advise("Create the bucket, or correct its name, the region or the endpoint")
    denied = _status(error) in (401, 403)
    source = f" (credentials from {credentials_from})" if denied else ""
    failure = StoreError(f"cannot {what}: {_said(error)}{source}", key=key, retryable=_is_passing(error))
    return failure.advise(refused(url) if denied else unreachable(url))


def _is_passing(error: Exception) -> bool:
    """Return whether the same request may succeed later: the server failed or is busy, or the connection broke."""
    status, kind = _status(error), _KIND.search(str(error))
    if status is not None:
        return status >= 500 or status in (408, 429)
    return kind is not None and kind[1] in _PASSING_KINDS


def _status(error: Exception) -> int | None:
    """Return the HTTP status in the text of obstore's error, which has it nowhere else."""
    found = _status_text(error)
    return int(found[:3]) if found else None


def _status_text(error: Exception) -> str | None:
    """Return the HTTP status with its text, such as 403 Forbidden."""
    found = _STATUS.search(str(error))
    return found[1].strip() if found else None


def _said(error: Exception) -> str:
    """Return one line: the status, the code and the message of the server, or obstore's own message.

    It never contains the body of an answer, which is XML or HTML.
    """
    text = str(error).partition("\n\nDebug source")[0]
    status, code, message = _status_text(error), _CODE.search(text), _MESSAGE.search(text)
    if status is None:
        return " ".join(text.split())
    said = f"the server answered {status}" + (f", {code[1]}" if code else "")
    if message and message[1].strip():
        first = html.unescape(message[1]).strip().splitlines()[0]
        said += f": {first[:_MESSAGE_CHARACTERS]}"
    return said
