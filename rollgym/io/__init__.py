"""Run folders and atomic files."""
