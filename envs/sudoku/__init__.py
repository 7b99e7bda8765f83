"""Sudoku: fill a grid that has exactly one solution."""
