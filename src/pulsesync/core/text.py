"""Text that comes from elsewhere, made fit for a terminal and a log."""


def printable(text: str, limit: int) -> str:
    """Text that a terminal shows and does not interpret, on one line and not longer than a limit."""
    return " ".join(one_line(text[:limit]).split())


def one_line(text: str) -> str:
    """Text that a terminal shows and does not interpret, on one line, with all of its spaces and of any length."""
    return "".join(c if c.isprintable() else _instead(c) for c in text)


def without_controls(text: str) -> str:
    """Text that a terminal shows and does not interpret, with its line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else _instead(c) for c in text)


def _instead(character: str) -> str:
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"
