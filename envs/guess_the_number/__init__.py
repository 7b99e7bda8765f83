"""GuessTheNumber: find a hidden number from higher/lower answers."""
