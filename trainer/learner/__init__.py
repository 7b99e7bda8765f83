"""The learner: forward passes, losses, optimizer steps and checkpoints."""
