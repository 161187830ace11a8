"""Weights inside a cluster: the sync of a process group, and the collectives it is made of."""
