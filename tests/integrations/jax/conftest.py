"""These tests run with the real packages, in an environment of their own: make test-jax.

They need no GPU. Where JAX has one, they use it: PYTHONPATH=src python -m pytest tests/integrations/jax
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # read when JAX is first used
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else JAX takes most of a GPU, and torch finds none
