"""`python -m tools.lint` checks what no type checker knows: words, pages, layout, names, monitoring."""

import sys

from tools.lint import arguments, layout, monitoring, pages, privacy, public_names, words

CHECKS = [arguments, layout, monitoring, pages, privacy, public_names, words]


def main() -> int:
    """Print what every check finds; return 1 if any found something."""
    found = [problem for module in CHECKS for problem in module.check()]
    print("\n".join(found or [f"{len(CHECKS)} checks of words, pages and names: nothing found"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
