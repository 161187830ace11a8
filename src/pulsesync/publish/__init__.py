"""Writing a run: compare with the last version, encode, commit; alone or as a team of trainers."""
