"""Maintain a run: squash, prune, verify and move pointers, in processes other than the trainer."""
