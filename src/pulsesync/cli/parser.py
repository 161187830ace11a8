"""Parse the command line with cyclopts, import the command that it names, and call it."""

from collections.abc import Sequence

from cyclopts import UNSET, App, ArgumentCollection, CycloptsError

import pulsesync
from pulsesync.cli import COMMANDS


def make_app() -> App:
    """Return the command line, with every command; a command's module is imported when it is asked for."""
    app = App(name="pulse", version=pulsesync.__version__, suppress_keyboard_interrupt=False, config=_refuse_empty)
    for name, (path, _) in COMMANDS.items():
        app.command(path, name=name)
    return app


def call(arguments: Sequence[str]) -> int:
    """Import the command that is named and call it; return its exit code.

    Raises:
        UsageError: there is no such command or option, or a value is invalid.
        PulseError: the command failed.
    """
    try:
        code: int = make_app()(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as e:
        from pulsesync.cli.options import UsageError

        raise UsageError(f"{str(e).strip()} pulse --help lists the commands, pulse COMMAND --help its options") from e
    return code


def _refuse_empty(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse an empty value: an unset variable in a script must not turn a check off.

    Cyclopts calls this for every command, after the command line and the environment are read.

    Raises:
        UsageError: a value is empty; the message names the option or the environment variable.
    """
    from pulsesync.cli.options import UsageError

    for argument in arguments:
        for token in argument.tokens:
            if token.value.strip() or token.implicit_value is not UNSET:
                continue  # a flag has no value of its own
            if token.source == "env":
                raise UsageError(f"{token.keyword} is set but empty; give it a value, or unset it")
            name = token.keyword or argument.name.removeprefix("--").upper()  # a positional one, as the help writes it
            raise UsageError(f"{name} is empty; give it a value, or leave it out")
