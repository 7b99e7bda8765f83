"""What of a learner can leave its device for a while."""

PARTS = ("optimiser", "weights")
"""Gradients are dropped with either: the next update begins with none."""
