"""Kinds of generated problems, in our own words: each a template with parameters."""
