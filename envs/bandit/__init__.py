"""Bandit: find the best of several machines by playing them."""
