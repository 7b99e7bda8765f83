"""Programs written by agents, run behind walls and judged by tests they cannot see."""
