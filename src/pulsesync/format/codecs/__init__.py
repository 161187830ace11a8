"""One file per codec. Each turns the changes of a tile into a payload and back; none depends on files or tensors.

`gap` and `dense` need no old weights: positions with new values, and the whole tile. `step` and `xor` (which is in
`dense`) are the same two relative to the old weights. `context` and `history` predict what changes from these.
"""
