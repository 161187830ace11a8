"""Weights inside a cluster: sync over a process group, and the collectives that it uses."""
