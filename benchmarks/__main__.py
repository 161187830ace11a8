"""Run the benchmarks by name: see harness/command.py."""

import sys

from benchmarks.harness.command import main

sys.exit(main(sys.argv[1:]))
