"""An inference engine that follows a run: the code that all engines share. Adapters contain only what differs.

`adapter` is the interface of an adapter. `weights` accesses the parameters of a rank, in place or through a mirror;
`follower` prepares, commits and rolls back an update on one rank; `update` coordinates all ranks, and `together` lets
the ranks coordinate themselves; `server` drives an engine's HTTP server. Nothing in this package imports an engine.
"""
