"""These tests run with the real packages, in an environment of their own: make test-jax."""
