"""Looking after a run: squash, prune and verify, away from the trainer."""
