"""Bytes and records: exactly what docs/format.md says, and no I/O."""
