"""Simulates training runs in virtual time: utilization, throughput, lost work, staleness, what to change."""
