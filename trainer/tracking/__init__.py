"""What a training run writes: metrics, checkpoints and console output."""
