"""Weights on their way from a learner's ranks to engines: parts, delta updates, and the engine's copy."""
