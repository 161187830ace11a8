"""Write a run: compare with the last version, encode, commit; in one process or in a team of them."""
