"""Simulates a training run in virtual time: utilization, throughput, lost work, staleness, and what to change."""
