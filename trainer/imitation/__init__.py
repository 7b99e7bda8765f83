"""Imitation: warm start from demonstrations."""
