"""How many weights change in a step, which, and why: measure it, explain it, predict it."""
