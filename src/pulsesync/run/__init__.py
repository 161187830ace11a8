"""Reading a run: what its objects are called, which path leads to a version, and the subscriber that follows it."""
