"""Rollouts: running many episodes at once."""
