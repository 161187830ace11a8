"""What is to be expected: how far a weight must move, how far Adam moves it, and what it takes to send that."""
