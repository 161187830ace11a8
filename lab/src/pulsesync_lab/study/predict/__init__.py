"""Predictions: how far a weight must move, how far Adam moves it, and what sending the changes costs."""
