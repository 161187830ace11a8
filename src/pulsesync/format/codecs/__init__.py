"""One file per codec. Each turns what changed in a tile into a payload and back; none knows files or tensors.

`gap` and `dense` need no old weights: positions with new values, and the whole tile. `step` and `xor` (which is in
`dense`) are the same two relative to the old weights. `context` and `history` predict what changes from these.
"""
