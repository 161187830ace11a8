"""One file per codec. Each turns what changed in a tile into a payload and back; none knows files or tensors.

`gap` needs no old weights, `context` and `history` code against them, `dense` repeats the tile.
"""
