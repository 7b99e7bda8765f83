"""Shared utilities: HTTP, signals, terminal output, version information."""
