"""An inference engine follows a run: what is the same for every engine, so that an adapter says only what differs.

`adapter` is what an adapter implements. `weights` has the parameters of a rank, in place or by a mirror; `follower` has
one rank prepare, commit and roll back; `update` has all ranks move together, and `together` lets the ranks do so by
themselves; `server` drives an engine's HTTP server. Nothing here imports an engine.
"""
