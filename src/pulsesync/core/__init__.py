"""What every other module builds on: types, the digest of a state, threads, temporary folders."""
