"""FrozenLake: walk over thin ice to the goal."""
