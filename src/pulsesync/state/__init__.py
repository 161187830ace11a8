"""Live weights: tensors as bits, the part of them that a process has, and the transaction that changes them."""
