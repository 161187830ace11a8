"""These tests run with the real vLLM, in an environment of its own: make test-vllm."""

import os
import sys
from pathlib import Path

# vLLM pins another numba than the other environments have. The compiled kernels of a checkout are kept for one version:
# tests that run at the same time would each throw away what the others have compiled.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(sys.prefix) / "numba"))
