"""Bytes and records: exactly what docs/FORMAT.md says, and no I/O."""
