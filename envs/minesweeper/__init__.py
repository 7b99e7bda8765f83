"""Minesweeper: uncover every cell that hides no mine."""
