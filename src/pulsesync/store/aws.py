"""Find credentials for S3 in the places where every AWS client looks, in the same order.

obstore itself supports environment variables, web identity, containers and the metadata service of an EC2 instance. It
does not read `~/.aws/credentials` and `~/.aws/config`, where most people keep their keys. This module does: keys,
region and endpoint of a profile. For profiles that obtain credentials (single sign-on, roles to assume, programs that
print credentials) it asks boto3, if that is installed.
"""

import configparser
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

_CREDENTIAL_OPTIONS = {
    "access_key_id",
    "secret_access_key",
    "credential_provider",
    "skip_signature",
    "web_identity_token_file",
    "container_credentials_relative_uri",
    "container_credentials_full_uri",
}
_REGION_OPTIONS, _REGION_VARIABLES = {"region", "default_region"}, ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINT_OPTIONS = {"endpoint", "endpoint_url", "endpoint_url_s3"}
_KEY_OPTIONS, _TOKEN_OPTIONS = {"access_key_id", "secret_access_key"}, {"session_token", "token", "credential_provider"}
_TOKEN_VARIABLES = ("AWS_SESSION_TOKEN", "AWS_TOKEN")
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# Settings of a profile that name a method to obtain credentials, instead of the credentials themselves. Those of the
# first line take precedence over keys in the same profile, as they do in the AWS command line.
_FIRST = ("role_arn", "web_identity_token_file", "sso_session", "sso_start_url", "login_session")
_PROCESS = "credential_process"


@dataclass(frozen=True)
class Credentials:
    """The settings for obstore that were found, where they come from, and where else was searched."""

    options: dict[str, Any] = field(repr=False)  # with secrets
    source: str  # for messages; never a secret
    tried: tuple[str, ...]  # each place that was searched, with what was found there, in order
    from_metadata: bool = False  # whether nothing was found, and obstore will ask the metadata service

    def missing(self, why: str) -> str:
        """Return a message that there are no credentials, with the reason why the metadata service gave none."""
        places = "; ".join((*self.tried, f"the metadata service of an EC2 instance ({why})"))
        return f"found no AWS credentials; provide them in one of the places that were tried, in order: {places}"


def find_credentials(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Credentials:
    """Look for credentials, region and endpoint where AWS clients do. given: the keywords of the store.

    Raises:
        ValueError: the profile that AWS_PROFILE names does not exist, or needs boto3, which is not installed; or there
            are no credentials, and AWS_EC2_METADATA_DISABLED is set, so the metadata service is not asked.
    """
    together = {**(given.get("config") or {}), **given}
    keywords = {name.lower().removeprefix("aws_"): value for name, value in together.items()}
    names = keywords.keys()
    # obstore sends this token with any keys that it is given, even if the token does not belong to them.
    token_in_environment = _any(environment, _TOKEN_VARIABLES)
    profile = _read_profile(environment)
    options: dict[str, Any] = {}
    region, endpoint = profile.get("region"), profile.get("endpoint_url") if profile.use_endpoint else None
    if region and not names & _REGION_OPTIONS and not _any(environment, _REGION_VARIABLES):
        options["region"] = region
    if endpoint and not names & _ENDPOINT_OPTIONS and not _any(environment, ENDPOINT_VARIABLES):
        options["endpoint"] = endpoint

    if names & _CREDENTIAL_OPTIONS:
        if token_in_environment and names >= _KEY_OPTIONS and not names & _TOKEN_OPTIONS:
            options["credential_provider"] = _without_token({name: keywords[name] for name in _KEY_OPTIONS})
        return Credentials(options, "the keywords of the store", ())
    if environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1"):
        return Credentials(options, "nowhere: AWS_SKIP_SIGNATURE is set", ())
    if environment.get("AWS_ACCESS_KEY_ID"):
        return Credentials(options, "AWS_ACCESS_KEY_ID", ())
    tried = ["AWS_ACCESS_KEY_ID (not set)"]
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environment.get("AWS_ROLE_ARN"):
        return Credentials(options, "AWS_WEB_IDENTITY_TOKEN_FILE", tuple(tried))
    tried.append("AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN (not set)")
    if found := profile.credentials():
        if token_in_environment and found.keys() == _KEY_OPTIONS:
            found = {"credential_provider": _without_token(found)}
        return Credentials({**options, **found}, profile.source, tuple(tried))
    tried.append(profile.looked)
    # obstore uses the second of these only together with a token file.
    container = {
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": (),
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",),
    }
    for variable, others in container.items():
        if all(environment.get(name) for name in (variable, *others)):
            return Credentials(options, variable, tuple(tried))
        tried.append(f"{' with '.join((variable, *others))} (not set)")
    credentials = Credentials(options, "the metadata service", tuple(tried), from_metadata=True)
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise ValueError(credentials.missing("AWS_EC2_METADATA_DISABLED is set"))
    return credentials


@dataclass(frozen=True)
class _Profile:
    """A profile, as read from the two files."""

    name: str
    required: bool  # whether AWS_PROFILE asks for this one by name
    secrets: Mapping[str, str] | None = field(repr=False)  # its section in the credentials file
    settings: Mapping[str, str] | None = field(repr=False)  # its section in the config file
    source: str
    looked: str
    use_endpoint: bool

    def credentials(self) -> dict[str, Any] | None:
        """Return settings for obstore; None if the profile has no credentials. Raises: ValueError."""
        if self.secrets is None and self.settings is None:
            if self.required:
                raise ValueError(f"AWS_PROFILE names a profile that does not exist: {self.looked}")
            return None
        for kind in _FIRST:
            if self.get(kind):
                return {"credential_provider": self._ask_boto3(kind)}
        if keys := _keys(self.secrets):
            return keys
        if self.get(_PROCESS):
            return {"credential_provider": self._ask_boto3(_PROCESS)}
        return _keys(self.settings)

    def get(self, setting: str) -> str | None:
        return (self.secrets or {}).get(setting) or (self.settings or {}).get(setting)

    def _ask_boto3(self, kind: str) -> Any:
        try:
            boto3, auth = import_module("boto3"), import_module("obstore.auth.boto3")
        except ImportError as e:
            raise ValueError(
                f"the AWS profile {self.name!r} obtains its credentials by {kind}, which needs boto3: pip install "
                "boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from e
        try:
            return auth.Boto3CredentialProvider(boto3.Session(profile_name=self.name))
        except Exception as e:  # boto3 may raise anything
            said = " ".join(str(e).split())
            raise ValueError(f"the AWS profile {self.name!r} gives no credentials by {kind}: {said}") from e


def _read_profile(environment: Mapping[str, str]) -> _Profile:
    asked = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    name = asked or "default"
    keys_file = _path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    settings_file = _path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config")
    secrets, why = _read_section(keys_file, name)
    settings, why_not = _read_section(settings_file, f"profile {name}")
    if settings is None and name == "default":
        settings, why_not = _read_section(settings_file, name)
    source = f"profile {name!r} in {keys_file}" if _keys(secrets) else f"profile {name!r} in {settings_file}"
    looked = f"profile {name!r} in {keys_file} ({why}) and in {settings_file} ({why_not})"
    use_endpoint = environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true"
    return _Profile(name, asked is not None, secrets, settings, source, looked, use_endpoint)


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # Path.expanduser raises for a user without a home folder, as in containers


def _read_section(path: Path, section: str) -> tuple[Mapping[str, str] | None, str]:
    """Return a section of a file, or None, and what was found. Raises: ValueError, which does not quote the file."""
    parser = configparser.RawConfigParser(strict=False)  # interpolation would fail on a % in a secret
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors write a byte order mark first
            parser.read_file(file)
    except FileNotFoundError:
        return None, "no such file"
    except OSError as e:
        return None, f"cannot be read: {e.strerror}"
    except (configparser.Error, UnicodeDecodeError) as e:
        where = f" in line {e.lineno}" if isinstance(e, configparser.MissingSectionHeaderError) else ""
        raise ValueError(f"{path} cannot be read as a file of AWS profiles: there is a syntax error{where}") from None
    if not parser.has_section(section):
        return None, "no such profile"
    return dict(parser.items(section)), "no credentials"


def _keys(section: Mapping[str, str] | None) -> dict[str, Any] | None:
    if not section or not section.get("aws_access_key_id") or not section.get("aws_secret_access_key"):
        return None
    keys = {"access_key_id": section["aws_access_key_id"], "secret_access_key": section["aws_secret_access_key"]}
    if token := section.get("aws_session_token"):
        keys["session_token"] = token
    return keys


def _without_token(keys: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that obstore calls for credentials: it returns these keys, and no token."""
    return lambda: {**keys, "token": None, "expires_at": None}


def _any(environment: Mapping[str, str], names: tuple[str, ...]) -> bool:
    return any(environment.get(name) for name in names)
