"""Which token is sent to which server: the one place where pulsesync reads a token to send from the environment.

A token is for one origin: the scheme, host and port of a server. `PULSE_SEND_TOKENS` names the origin of each of its
tokens, so a location that is named by mistake, or in a request, is sent none. What the readers of one's own server
must send is another variable, `PULSE_TOKEN`, which only `pulse serve` and `pulse relay` read.
"""

import os

from pulsesync.core.environment import read_switch, read_variable
from pulsesync.core.location import ParsedLocation

SEND_TOKENS = "PULSE_SEND_TOKENS"
IN_CLEAR = "PULSE_TOKEN_IN_CLEAR"


def find_token(at: ParsedLocation) -> str | None:
    """Return the token that the environment has for a server, or None.

    Raises: ValueError, if the variable is malformed, or has two tokens for one server; the message shows no token.
    """
    tokens: dict[str, str] = {}
    for number, entry in enumerate((read_variable(SEND_TOKENS) or "").split(), 1):
        server, _, token = entry.partition("=")
        origin = _origin(server)
        if origin is None or not token:
            raise ValueError(
                f"{SEND_TOKENS} must be ORIGIN=TOKEN, such as https://host:8765=TOKEN, with spaces between several; "
                f"entry {number} is not"
            )
        if "://" in token or token.endswith(","):  # the tokens of all servers would be sent to the first
            raise ValueError(
                f"{SEND_TOKENS} must have spaces or newlines between its entries, and no commas; entry {number} has "
                "a comma at its end, or the address of another server in its token"
            )
        if tokens.setdefault(origin, token) != token:
            raise ValueError(f"{SEND_TOKENS} has two tokens for {origin}; leave one of them out")
    return tokens.get(at.origin)


def may_send_in_clear() -> bool:
    """Return whether the environment permits to send tokens over http to other machines. Raises: ValueError."""
    return read_switch(IN_CLEAR)


def advise_token(at: ParsedLocation) -> str:
    """Return how to send a token to a server, for an error."""
    text = f"pass token= to Subscriber or open_store, or set {SEND_TOKENS}={at.origin}=TOKEN"
    if "PULSE_TOKEN" in os.environ:
        text += "; PULSE_TOKEN is not sent: it is what the readers of pulse serve and pulse relay must send"
    return text


def _origin(server: str) -> str | None:
    """Return the origin that a text names, None if it is not that of a server."""
    try:
        at = ParsedLocation.parse(server)
    except ValueError:  # it may show what was meant to be a token
        return None
    return at.origin if at.scheme in ("http", "https") and not at.segments else None
