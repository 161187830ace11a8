"""Locations: what is accepted, what two of them have in common, and that no message contains a secret."""

import os
from pathlib import Path

import pytest

from pulsesync.core.location import ParsedLocation, parse_path, redacted
from pulsesync.store import CachedStore, MemoryStore

parse = ParsedLocation.parse

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("text", "scheme", "authority", "segments"),
    [
        ("s3://bucket/a/b", "s3", "bucket", ("a", "b")),
        ("S3://bucket/a/b//", "s3", "bucket", ("a", "b")),
        ("gs://my.bucket_1", "gs", "my.bucket_1", ()),
        ("az://box/ü b/~c", "az", "box", ("ü b", "~c")),
        ("memory://this test", "memory", "this test", ()),
        ("memory://", "memory", "", ()),
        ("HTTP://Host/Run/", "http", "host:80", ("Run",)),
        ("https://host.example/a@b", "https", "host.example:443", ("a@b",)),
        ("https://host:443", "https", "host:443", ()),
        ("http://[::0:1]:8765/run", "http", "[::1]:8765", ("run",)),
    ],
)
def test_a_url_is_parsed_into_scheme_authority_and_names(
    text: str, scheme: str, authority: str, segments: tuple[str, ...]
) -> None:
    found = parse(text)
    assert (found.scheme, found.authority, found.segments, found.path) == (scheme, authority, segments, None)
    assert str(found) == text
    assert parse(found) is found


@pytest.mark.parametrize(
    "rest",
    [
        "ok/../x",
        "ok/./x",
        "ok//x",
        "ok/%2e%2e/x",
        "ok/.%2E/x",
        "ok/..%2fx",
        "ok/x%2f..%2f",
        "ok/%252e%252e/x",
        "ok/.\t./x",
        "ok/.\n./x",
        "ok/.\r./x",
        "ok/.. ",
        "ok/.\u2028./x",
        "ok/x\x00",
        "ok/\x7f",
        "ok/.\u200b./x",
        "ok\\..\\x",
        "ok?x",
        "ok#x",
        "ok/..;/x",
        "ok/..;a=b/x",
        "ok/.../x",
        "ok/. ./x",
        "ok/ /x",
        "ok/\uff0e\uff0e/x",
        "ok/\u2025/x",
        "ok/..\uff0fx",
        "ok/\uff052e",
        "..",
    ],
)
def test_a_url_that_could_be_read_in_two_ways_is_refused(rest: str) -> None:
    for scheme in ("s3", "gs", "az", "http", "https"):
        with pytest.raises(ValueError, match="must not contain") as caught:
            parse(f"{scheme}://bucket/{rest}")
        assert str(caught.value).isprintable()


def test_a_url_of_a_scheme_alone_is_refused() -> None:
    for scheme in ("s3", "gs", "az", "http", "https"):
        with pytest.raises(ValueError, match="must be"):
            parse(f"{scheme}://")


def test_the_url_for_another_parser_says_the_same() -> None:
    assert parse("s3://bucket/a b/ü:@").url == "s3://bucket/a%20b/%C3%BC:@"
    assert parse("https://host").url == "https://host:443"


def test_what_is_below_is_decided_by_names(tmp_path: Path) -> None:
    runs = parse("s3://bucket/runs")
    assert parse("s3://bucket/runs/one/").is_under(runs)
    assert parse("s3://bucket/runs/").is_under(runs)
    for other in ("s3://bucket/runsx", "s3://bucket", "s3://other/runs/one", "gs://bucket/runs/one", "/runs/one"):
        assert not parse(other).is_under(runs)
    assert parse("https://HOST:443/a/b").is_under(parse("https://host/a"))
    assert not parse("https://host/a").is_under(parse("http://host/a"))
    assert not parse("https://host:8443/a").is_under(parse("https://host/a"))
    (tmp_path / "allowed").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "allowed/link").symlink_to(tmp_path / "outside")
    allowed = parse(tmp_path / "allowed")
    assert parse(f"{tmp_path}/allowed/x").is_under(allowed)
    for where in ("allowed/../outside", "allowed/link", "allowedx", "outside"):
        assert not parse(f"{tmp_path}/{where}").is_under(allowed)
        assert not parse(f"file://{tmp_path}/{where}").is_under(allowed)


def test_a_path_may_be_relative_or_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for text in ("run", "./run", "a/../run", "~/run", "file://~/run", f"{tmp_path}/run", f"file://{tmp_path}/run"):
        assert parse(text).resolved() == parse(tmp_path / "run")
    assert str(parse("../run")) == "../run"
    assert parse("~").path == tmp_path
    assert parse("./s3:/b").path == Path("s3:/b")
    assert parse("a:b/c%20d?e#f@g").path == Path("a:b/c%20d?e#f@g")
    assert parse(os.fspath(tmp_path) + "/50%").path == tmp_path / "50%"


def test_a_file_of_this_machine_may_be_named_as_other_programs_write_it() -> None:
    assert parse("file://localhost/a/run").path == parse("file:///a/run").path == Path("/a/run")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("s3:/b/run", r"s3:/b/run is no path and no URL: write s3://b/run, or \./s3:/b/run for a folder"),
        ("S3:b/run", "write s3://b/run"),
        ("https:/host/run", "write https://host/run"),
        ("file:/a/run", "write file:///a/run"),
        ("localhost:8765/run", r"write http://localhost:8765/run, or \./localhost:8765/run"),
        ("localhost:8765/run?token=a", r"write http://localhost:8765/run, or \./localhost:8765/run for a"),
        ("C:\\run", r"C:\\run is a path of Windows"),
        ("c:/run", "is a path of Windows"),
        ("\\\\host\\share", "is a path of Windows"),
        ("~someone/run", r"~/NAME for a folder in your home, and its absolute path"),
        ("", "must not be empty; write . for the current folder"),
        ("run\n", "must not contain control characters"),
        ("run\ud800", "names of files can have"),
        ("file://", "must not be empty"),
        ("file:///a%20b", "give the path itself, without file://"),
        ("file:///a\tb", "must not contain control characters"),
        ("s3:///run", "must be followed by the name of a bucket"),
        ("s3://bucket:9000/run", "must be followed by the name of a bucket"),
        ("https://host:port/run", "must be such as https://host/path"),
        ("http://host:99999", "must be such as https://host/path"),
        ("http://[::g]/x", "must be such as https://host/path"),
        ("http://bücher.example/x", "must be such as https://host/path"),
        ("ftp://host/run", r"must be one of .*file://.*memory://.*s3://.*https://; got ftp://"),
    ],
)
def test_a_text_with_which_something_else_was_meant_says_what_to_write(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse(text)


@pytest.mark.parametrize("location", [None, 3, b"run", ["run"]])
def test_another_type_is_named(location: object) -> None:
    with pytest.raises(TypeError, match=f"a path, a URL or a store; got {type(location).__name__}"):
        parse(location)


@pytest.mark.parametrize(
    "text",
    [
        f"http://host/run?token={SECRET}",
        f"http://host/run#{SECRET}",
        f"https://host/run\n?token={SECRET}",
        f"https://me:{SECRET}@host/run",
        f"https://{SECRET}@host/run",
        f"https://me:{SECRET}/x@host/run",
        f"https://me:{SECRET}?x@host/run",
        f"https://me:{SECRET}#x@host/run",
        f"https://me:x?{SECRET}@host/run",
        f"https:/me:{SECRET}?x@host/run",
        f"https://me:{SECRET} x@host:bad/run",
        f"s3://key:{SECRET}@bucket/run",
        f"s3://bucket/run?secret_access_key={SECRET}&region=x",
        f"s3:/bucket/run?secret_access_key={SECRET}",
        f"s3:/key:{SECRET}@bucket/run",
        f"ftp://me:{SECRET}@host/run",
        f"token={SECRET}://x",
        f"az://box/../run?sig={SECRET}'{SECRET} {SECRET}",
    ],
)
def test_no_message_about_a_location_contains_a_secret(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        parse(text)
    assert SECRET not in repr(caught.value)
    assert SECRET not in redacted(text)


def test_the_path_of_a_folder_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_path("~/cache") == tmp_path / "cache"
    for text in ("s3://bucket/cache", f"https://me:{SECRET}@host/cache", "s3:/bucket", "C:\\cache"):
        with pytest.raises(ValueError, match="path") as caught:
            parse_path(text)
        assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match="folder must be the path of a folder: a path of this machine is needed here"):
        CachedStore(MemoryStore(), "s3://bucket/cache")
