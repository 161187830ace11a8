"""The location of a run, parsed once: it is compared, opened and shown from the same value.

A text can mean different places to a reader and to a library that opens it: obstore's parser removes tabs, newlines and
spaces at the ends, decodes `%2e`, and then resolves `..`; `urllib` removes tabs and newlines; servers decode `%2f`, and
some resolve `..;` or drop dots and spaces at the end of a name.
So nothing that could be read in two ways is accepted, and stores are opened from the parts, not from the text.
"""

import ipaddress
import os
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

_PORTS: Final = {"http": 80, "https": 443}
_SCHEMES: Final = ("file", "memory", "s3", "gs", "az", *_PORTS)
_ALLOWED = "a path, file://, memory://, s3://, gs://, az://, http:// and https://"
_FORBIDDEN: Final = frozenset("%?#\\")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_SERVER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?", re.ASCII)
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_HOST = re.compile(r"[A-Za-z0-9.-]+:[0-9]{4,5}(/|$)", re.ASCII)
_MISTYPED = re.compile(rf"({'|'.join(_SCHEMES)}):(?!//)", re.IGNORECASE)
_IN_SEGMENT = "!$&'()*+,;=:@"  # what `quote` need not encode in a path, by RFC 3986

_URL = re.compile(r"""(://)(?:[^/\s'"]*@)?([^\s?#'"]*)(?:[?#][^\s'")]+)?""")
_ASSIGNED = re.compile(
    r"""\b((?:\w+[_-])?(?:token|secret|password|signature|sig|api[_-]?key|access[_-]?key(?:[_-]id)?)=)[^\s&,;'"()]+""",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ParsedLocation:
    """The parts of a location. Two are equal if they open the same store.

    Args:
        scheme: file, memory, s3, gs, az, http or https, in lower case; a path is a file.
        authority: Of a URL: the bucket, or the host in lower case with its port, also where that is the scheme's own.
        segments: Of a URL: the names between its slashes.
        path: Of a file: its path, which may be relative; None for others.
        text: The location as it was given, for people. It contains no secret, because `parse` accepts none.
    """

    scheme: str
    authority: str = ""
    segments: tuple[str, ...] = ()
    path: Path | None = None
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, location: object) -> "ParsedLocation":
        """Parse a path or a URL. A `~` at the beginning of a path is the home folder of this user.

        Raises:
            TypeError: it is neither a text nor a path.
            ValueError: it is empty, has another scheme, or could be read in two ways; the message contains no secret.
        """
        if isinstance(location, ParsedLocation):
            return location
        text = os.fspath(location) if isinstance(location, str | os.PathLike) else None
        if not isinstance(text, str):
            raise TypeError(f"a location must be a path, a URL or a store; got {type(location).__name__}")
        scheme, colon, rest = text.partition("://")
        if not colon or isinstance(location, os.PathLike):
            return cls("file", path=parse_path(text), text=text)
        scheme = scheme.lower()
        if scheme not in _SCHEMES:
            raise ValueError(f"a location must be one of {_ALLOWED}; got {redacted(scheme)}://")
        if scheme == "file":
            if not _FORBIDDEN.isdisjoint(rest):
                raise ValueError(
                    "file:// must not contain '%', '?', '#' or '\\'; give the path itself, without file://"
                )
            path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
            return cls(scheme, path=parse_path(path), text=text)
        _check_characters(rest, text)
        authority, *segments = rest.rstrip("/").split("/")
        if scheme in _PORTS:
            authority = _parse_server(scheme, authority, text)
        elif scheme != "memory" and not _BUCKET.fullmatch(authority):
            raise ValueError(
                f"{scheme}:// must be followed by the name of a bucket or container; got {redacted(text)}: the address "
                "of a server belongs in endpoint= or AWS_ENDPOINT_URL"
            )
        if any(not name.partition(";")[0].strip(". ") for name in _normal(rest).rstrip("/").split("/")[1:]):
            raise ValueError(
                "a URL of a run must not contain '//', or names of dots and spaces such as '..'; got "
                f"{redacted(text)!r}: write the location that is meant"
            )
        return cls(scheme, authority, tuple(segments), text=text)

    @property
    def origin(self) -> str:
        """The scheme and the authority: what a credential is for. `https://host` and `https://HOST:443` have one."""
        return f"{self.scheme}://{self.authority}"

    @property
    def url(self) -> str:
        """The URL for a library that parses it again: every character that could mean something is encoded."""
        return self.origin + self.url_path

    @property
    def url_path(self) -> str:
        """The path of the URL, encoded: empty, or beginning with a slash."""
        return "".join("/" + quote(segment, safe=_IN_SEGMENT) for segment in self.segments)

    def resolved(self) -> "ParsedLocation":
        """Return the location of a path that is absolute and without links, as they are now; a URL as it is."""
        if self.path is None:
            return self
        real = Path(os.path.realpath(self.path))
        return ParsedLocation(self.scheme, path=real, text=str(real))

    def is_under(self, other: "ParsedLocation") -> bool:
        """Return whether this is the other location, or one below it. Links in paths are resolved."""
        here, there = self.resolved(), other.resolved()
        if here.path is not None and there.path is not None:
            return here.path.is_relative_to(there.path)
        return here.origin == there.origin and here.segments[: len(there.segments)] == there.segments

    def __str__(self) -> str:
        return self.text


def _check_characters(rest: str, text: str) -> None:
    """Raises: ValueError, for what parsers of URLs remove, decode, resolve, or take for something else than a name."""
    instead = f"got {redacted(text)}: pass token= or the store's keywords, or set environment variables"
    if "@" in rest.partition("/")[0]:
        raise ValueError(f"a location must not contain a user or a password; {instead}")
    if "?" in rest or "#" in rest:
        raise ValueError(f"a location must not contain settings, so no '?' and no '#'; {instead}")
    if not rest.isprintable() or rest != rest.strip() or not _FORBIDDEN.isdisjoint(_normal(rest)):
        raise ValueError(
            "a URL of a run must not contain control characters, '%', '\\', or spaces at its ends; got "
            f"{redacted(text)!r}: write each character as it is, such as a space for %20"
        )


def _normal(rest: str) -> str:
    """What a server that normalizes Unicode makes of a text: `．．` becomes `..`."""
    return unicodedata.normalize("NFKC", rest)


def _parse_server(scheme: str, authority: str, text: str) -> str:
    match = _SERVER.fullmatch(authority)
    host, port = (match[1].lower(), int(match[2] or _PORTS[scheme])) if match else ("", 0)
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            host = ""
    if not host or not 0 < port < 1 << 16:
        raise ValueError(f"the address of a server must be such as https://host/path; got {redacted(text)!r}")
    return f"{host}:{port}"


def parse_path(text: str) -> Path:
    """Return the path of a text. A `~` at its beginning is the home folder of this user.

    Raises: ValueError, if something else than a path of this machine was meant; the message contains no secret.
    """
    if not text:
        raise ValueError("a location must not be empty; write . for the current folder")
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError(f"a path must not contain control characters; got {redacted(text)!r}")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can contain one
        raise ValueError(f"a path must have characters that names of files can have; got {redacted(text)!a}") from None
    if "://" in text:
        raise ValueError(f"a path of this machine is needed here; got {redacted(text)}")
    if mistyped := _MISTYPED.match(text):
        scheme, rest = mistyped[1].lower(), text[mistyped.end() :]
        rest = rest if scheme == "file" else rest.lstrip("/")
        raise ValueError(
            f"{redacted(text)} is no path and no URL: write {redacted(f'{scheme}://{rest}')}, or ./{redacted(text)} "
            "for a folder of that name"
        )
    if _HOST.match(text):
        shown = redacted(text)
        raise ValueError(f"{shown} is no path and no URL: write http://{shown}, or ./{shown} for a folder of that name")
    if _WINDOWS.match(text):
        raise ValueError(f"{text} is a path of Windows, where pulsesync does not run; give a path of this machine")
    if text.startswith("~"):
        if text != "~" and not text.startswith("~/"):
            raise ValueError(
                f"{text} is not a path: write ~/NAME for a folder in your home, and its absolute path for another"
            )
        return Path(text).expanduser()
    return Path(text)


def redacted(text: str) -> str:
    """A text that was given as a location, for messages: without user, password, query and fragment.

    What follows is for a text of which nothing is known; `without_credentials` is for sentences.
    """
    scheme, colon, rest = text.partition("://")
    if not colon:
        scheme, rest = "", text
    rest, *more = re.split("[?#]", rest, maxsplit=1)
    if more and "@" in more[0] and (colon or _MISTYPED.match(rest)):
        rest = "…"  # a password with one of these characters in it
    elif "@" in rest and (colon or _MISTYPED.match(rest)):
        rest = "…@" + rest.rpartition("@")[2]
    return _ASSIGNED.sub(r"\1…", scheme + colon + rest)


def without_credentials(text: str) -> str:
    """A text without what can be a credential in it: user, password, query and fragment of addresses, `token=…`."""
    return _ASSIGNED.sub(r"\1…", _URL.sub(r"\1\2", text))
