"""Mastermind: break a code of digits from black and white pegs."""
