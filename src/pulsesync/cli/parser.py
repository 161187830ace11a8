"""Parse the command line with cyclopts, import the command that it names, and call it."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import cyclopts

import pulsesync
from pulsesync.cli import COMMANDS, place_of
from pulsesync.core.location import parse_path, redacted
from pulsesync.errors import PulseError


def make_app() -> cyclopts.App:
    """Return the command line, with every command; a command's module is imported when it is asked for."""
    version = pulsesync.__version__
    app = cyclopts.App(name="pulse", version=version, suppress_keyboard_interrupt=False, config=_check_values)
    for name in COMMANDS:
        app.command(place_of(name), name=name)
    return app


def call(arguments: Sequence[str]) -> int:
    """Import the command that is named and call it; return its exit code. Raises: UsageError, and as the command."""
    _check_installed(arguments[0])
    try:
        code: int = make_app()(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as e:
        from pulsesync.cli.options import UsageError

        raise UsageError(_explained(e)) from e
    return code


def _check_installed(command: str) -> None:
    """Raise PulseError for a command of pulsesync-lab where that is missing, or is not of this version."""
    if not place_of(command).startswith("pulsesync_lab."):
        return
    wanted = pulsesync.__version__
    version = import_module("pulsesync_lab").__version__ if find_spec("pulsesync_lab") else None
    if version != wanted:
        found = "which is not installed" if version is None else f"of which {version} is installed"
        raise PulseError(
            f"pulse {command} needs the package pulsesync-lab {wanted}, {found}: pip install pulsesync-lab=={wanted}, "
            "or in a checkout of pulsesync pip install ./lab"
        )


def _explained(error: cyclopts.CycloptsError) -> str:
    """Return what is wrong with a command line, and where its options are described."""
    command = " ".join(("pulse", *(error.command_chain or ("COMMAND",))))
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        name, keyword = error.argument.name, error.keyword
        if keyword is not None:
            return f"{keyword} needs a value; {command} --help describes it"
        if error.argument.field_info.is_positional:
            name = name.removeprefix("--").upper()  # as the help writes it
        return f"{command} needs {name}, which was not given; {command} --help describes it"
    if isinstance(error, cyclopts.UnusedCliTokensError) and error.unused_tokens:
        return f"{command} does not take {redacted(error.unused_tokens[0])!r}; {command} --help lists what it takes"
    text = str(error).strip()
    if isinstance(error, cyclopts.UnknownOptionError):
        _, sign, value = (error.token.keyword or error.token.value).partition("=")
        text = text.replace(sign + value, sign and "=…")  # it may be a secret
    return f"{text} pulse --help lists the commands, {command} --help its options"


def _check_values(_app: cyclopts.App, _commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
    """Refuse empty values and URLs in the place of paths. Raises: UsageError.

    An unset variable in a script must not turn a check off, and no folder of the name `s3:` is to be created. Cyclopts
    calls this for every command, after the command line and the environment are read.
    """
    from pulsesync.cli.options import UsageError

    for argument in arguments:
        for token in argument.tokens:
            name = token.keyword or argument.name.removeprefix("--").upper()  # a positional one, as the help writes it
            if not token.value.strip() and token.implicit_value is cyclopts.UNSET:  # a flag has no value of its own
                if token.source == "env":
                    raise UsageError(f"{name} is set but empty; give it a value, or unset it")
                raise UsageError(f"{name} is empty; give it a value, or leave it out")
            if Path in (argument.hint, *get_args(argument.hint)):
                try:
                    parse_path(token.value)
                except ValueError as e:
                    raise UsageError(f"{name}: {e}") from e
