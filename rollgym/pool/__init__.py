"""Environment pools: many environments in worker processes or threads."""
