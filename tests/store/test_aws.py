"""Credentials for S3: found where every AWS client looks, in the same order; and what is said where there are none."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from pulsesync.store import ObjectStore
from pulsesync.store.aws import find_credentials
from tests.s3 import ACCESS_KEY, SECRET_KEY, Server
from tests.store.test_object import broken_server, respond

KEYS = "aws_access_key_id = {0}-id\naws_secret_access_key = {0}-%secret\n"
IN_PROFILE = {"access_key_id": "file-id", "secret_access_key": "file-%secret"}


class Home:
    """A home folder, and the environment of a process that lives in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / ".aws").mkdir()

    def write(self, credentials: str | None = None, config: str | None = None) -> None:
        for name, text in (("credentials", credentials), ("config", config)):
            if text is not None:
                (self.path / ".aws" / name).write_text(text)

    def environment(self, **more: str) -> dict[str, str]:
        files = {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
        return {name: str(self.path / file) for name, file in files.items()} | more


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_keys_are_taken_from_the_credentials_file(home: Home) -> None:
    home.write("[other]\n" + KEYS.format("other") + "[default]\n" + KEYS.format("file"))
    found = find_credentials({}, home.environment())
    assert found.options == IN_PROFILE
    assert found.source == f"profile 'default' in {home.path}/.aws/credentials"


def test_a_profile_is_chosen_by_name_in_both_files(home: Home) -> None:
    home.write("[p]\n" + KEYS.format("file"), "[default]\nregion = no\n[profile p]\nregion = eu-west-3\n")
    for variable in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        found = find_credentials({}, home.environment(**{variable: "p"}))
        assert found.options == {**IN_PROFILE, "region": "eu-west-3"}


def test_keys_in_the_config_file_and_session_tokens_count_too(home: Home) -> None:
    home.write(config="[default]\n" + KEYS.format("file") + "aws_session_token = t\nendpoint_url = http://minio:9000\n")
    found = find_credentials({}, home.environment())
    assert found.options == {**IN_PROFILE, "session_token": "t", "endpoint": "http://minio:9000"}
    assert find_credentials({}, home.environment(AWS_IGNORE_CONFIGURED_ENDPOINT_URLS="true")).options == {
        **IN_PROFILE,
        "session_token": "t",
    }


def test_the_credentials_file_comes_before_the_config_file(home: Home) -> None:
    home.write("[default]\n" + KEYS.format("file"), "[default]\n" + KEYS.format("config"))
    assert find_credentials({}, home.environment()).options == IN_PROFILE


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({"AWS_ACCESS_KEY_ID": "k", "AWS_PROFILE": "default"}, "AWS_ACCESS_KEY_ID"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "t", "AWS_ROLE_ARN": "r"}, "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ({"AWS_SKIP_SIGNATURE": "true"}, "nowhere: AWS_SKIP_SIGNATURE is set"),
    ],
)
def test_the_environment_comes_before_the_files(home: Home, variables: dict[str, str], source: str) -> None:
    home.write("[default]\n" + KEYS.format("file"), "[default]\nregion = eu-west-3\n")
    found = find_credentials({}, home.environment(**variables))
    assert (found.options, found.source) == ({"region": "eu-west-3"}, source)


def test_keywords_come_before_everything(home: Home) -> None:
    home.write("[default]\n" + KEYS.format("file"), "[default]\nregion = eu-west-3\nendpoint_url = http://x\n")
    given = {"access_key_id": "k", "secret_access_key": "s", "aws_region": "r", "config": {"endpoint": "http://y"}}
    found = find_credentials(given, home.environment(AWS_ACCESS_KEY_ID="e", AWS_PROFILE="missing"))
    assert (found.options, found.source) == ({}, "the keywords of the store")


def test_region_and_endpoint_of_the_environment_come_before_those_of_the_profile(home: Home) -> None:
    home.write("[default]\n" + KEYS.format("file"), "[default]\nregion = eu-west-3\nendpoint_url = http://x\n")
    found = find_credentials({}, home.environment(AWS_DEFAULT_REGION="r", AWS_ENDPOINT_URL_S3="http://y"))
    assert found.options == IN_PROFILE


def test_containers_come_after_the_files(home: Home) -> None:
    relative = home.environment(AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="/c")
    assert find_credentials({}, relative).source == "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"
    full = home.environment(AWS_CONTAINER_CREDENTIALS_FULL_URI="http://c", AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE="t")
    assert find_credentials({}, full).source == "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    home.write("[default]\n" + KEYS.format("file"))
    assert find_credentials({}, relative).options == IN_PROFILE


def test_a_profile_that_does_not_exist_is_named_with_the_files(home: Home) -> None:
    home.write("[default]\n" + KEYS.format("file"))
    with pytest.raises(ValueError, match=r"'typo' in .* \(no such profile\) and in .* \(no such file\)"):
        find_credentials({}, home.environment(AWS_PROFILE="typo"))


@pytest.mark.parametrize("setting", ["sso_session", "sso_start_url", "role_arn", "credential_process"])
def test_a_profile_that_needs_boto3_says_so(home: Home, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    home.write(config=f"[profile p]\n{setting} = x\n")
    with pytest.raises(ValueError, match=f"'p' .* by {setting}.*pip install boto3"):
        find_credentials({}, home.environment(AWS_PROFILE="p"))


def test_keys_prevail_over_a_program_in_the_same_profile(home: Home) -> None:
    home.write("[default]\ncredential_process = false\n" + KEYS.format("file"))
    assert find_credentials({}, home.environment()).options == IN_PROFILE


def test_a_file_that_is_broken_is_named_and_not_quoted(home: Home) -> None:
    home.write("aws_secret_access_key = hush\n")
    with pytest.raises(ValueError, match=r"credentials cannot be read.* syntax error in line 1") as e:
        find_credentials({}, home.environment())
    assert "hush" not in str(e.value)


def test_without_credentials_and_metadata_the_error_lists_what_was_tried(home: Home) -> None:
    home.write(config="[default]\nregion = eu-west-3\n")
    with pytest.raises(ValueError, match="found no AWS credentials") as e:
        find_credentials({}, home.environment(AWS_EC2_METADATA_DISABLED="true"))
    assert str(e.value).partition("in order: ")[2].split("; ") == [
        "AWS_ACCESS_KEY_ID (not set)",
        "AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN (not set)",
        f"profile 'default' in {home.path}/.aws/credentials (no such file) and in {home.path}/.aws/config "
        "(no credentials)",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI (not set)",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI with AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE (not set)",
        "the metadata service of an EC2 instance (AWS_EC2_METADATA_DISABLED is set)",
    ]


def test_a_user_without_a_home_folder_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)

    def unknown(user: int) -> None:
        raise KeyError(user)  # as for a user id that the container does not know

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert find_credentials({}, {"AWS_ACCESS_KEY_ID": "k"}).source == "AWS_ACCESS_KEY_ID"


def test_a_store_without_credentials_says_which_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in home.environment(AWS_EC2_METADATA_DISABLED="true").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="cannot open s3://bucket/run: found no AWS credentials"):
        ObjectStore("s3://bucket/run")


def test_the_default_profile_may_be_called_profile_default_and_a_file_may_begin_with_a_mark(home: Home) -> None:
    home.write("\ufeff[default]\n" + KEYS.format("file"), "\ufeff[profile default]\nregion = eu-west-9\n")
    assert find_credentials({}, home.environment()).options == {**IN_PROFILE, "region": "eu-west-9"}


def test_keys_of_a_profile_or_of_keywords_are_not_sent_with_a_session_token_of_the_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write("[default]\n" + KEYS.format("file"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    for name, value in home.environment(AWS_SESSION_TOKEN="stale", AWS_REGION="us-east-1").items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        respond(request, 200, b"x")

    with broken_server(answer) as endpoint:
        assert ObjectStore("s3://bucket/run", endpoint=endpoint).get("head") == b"x"
        home.write("[default]\n" + KEYS.format("file") + "aws_session_token = fresh\n")
        assert ObjectStore("s3://bucket/run", endpoint=endpoint).get("head") == b"x"
        assert ObjectStore("s3://bucket/run", endpoint=endpoint, **IN_PROFILE).get("head") == b"x"
        given = {"AWS_ACCESS_KEY_ID": "file-id", "secret_access_key": "s", "endpoint": endpoint}
        assert ObjectStore("s3://bucket/run", config=given).get("head") == b"x"
        assert ObjectStore("s3://bucket/run", config=given, token="given").get("head") == b"x"
    assert all("Credential=file-id/" in headers["authorization"] for headers in seen)
    assert [headers.get("x-amz-security-token") for headers in seen] == [None, "fresh", None, None, "given"]


def test_secrets_are_not_shown(home: Home) -> None:
    home.write("[default]\n" + KEYS.format("file"))
    assert "%secret" not in repr(find_credentials({}, home.environment()))


# -- in a process of its own, with a real server ---------------------------------------------------------------------

USE = """
import sys
from pulsesync.store import ObjectStore
from pulsesync.errors import StoreError

try:
    store = ObjectStore(sys.argv[1])
    store.put("head", b"1")
    print(store.get("head"))
except StoreError as e:
    print(e.retryable, e)
"""


def use(url: str, environment: dict[str, str]) -> str:
    """What a process with no other environment says; it takes half a second, most of it imports."""
    source = {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "PATH": os.environ["PATH"],
        "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",  # a test that fails must not ask the network either
    }
    command = [sys.executable, "-c", USE, url]
    done = subprocess.run(command, capture_output=True, text=True, env=source | environment, timeout=60, check=True)
    return done.stdout.strip()


def test_a_home_folder_with_a_profile_is_enough_and_no_metadata_service_is_asked(s3_server: Server, home: Home) -> None:
    home.write(
        f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n",
        f"[default]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n",
    )
    asked: list[str] = []
    with broken_server(lambda request: asked.append(request.path)) as metadata:
        said = use(s3_server.fresh_url(), {"HOME": str(home.path), "AWS_METADATA_ENDPOINT": metadata})
    assert said == "b'1'"
    assert asked == []


def test_wrong_keys_of_a_profile_are_refused_in_one_line_that_names_it(s3_server: Server, home: Home) -> None:
    home.write(f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key=mistaken\n")
    said = use(s3_server.fresh_url(), {"HOME": str(home.path), "AWS_ENDPOINT_URL": s3_server.endpoint})
    assert f"profile 'default' in {home.path}/.aws/credentials" in said
    assert "403 Forbidden, SignatureDoesNotMatch:" in said
    assert "<" not in said
    assert "mistaken" not in said


@pytest.mark.parametrize(("status", "words", "retryable"), [(404, "404 Not Found", False), (503, "503 Serv", True)])
def test_where_the_metadata_service_has_none_the_error_lists_what_was_tried(
    home: Home, status: int, words: str, retryable: bool
) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        respond(request, status, b"<html>no</html>")

    with broken_server(answer) as metadata:
        said = use("s3://bucket/run", {"HOME": str(home.path), "AWS_METADATA_ENDPOINT": metadata})
    assert said.startswith(f"{retryable} cannot write head in s3://bucket/run: found no AWS credentials")
    assert f"profile 'default' in {home.path}/.aws/credentials (no such file)" in said
    assert f"EC2 instance ({words}" in said
