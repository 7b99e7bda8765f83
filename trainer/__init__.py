"""The trainer: credit, losses, batches, learners and the training loop."""
