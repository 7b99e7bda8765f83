"""Countdown: reach a target number by arithmetic."""
