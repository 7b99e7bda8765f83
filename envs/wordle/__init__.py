"""Wordle: find a hidden word from marked guesses."""
