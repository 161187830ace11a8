"""Adapters for other programs: one module or package for each."""
