"""Read a run: the keys of its objects, the path that leads to a version, and the subscriber that follows it."""
