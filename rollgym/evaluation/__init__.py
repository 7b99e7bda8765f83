"""Evaluation: plan, run, metrics, statistics, comparison and replay."""
