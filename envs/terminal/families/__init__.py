"""Families of generated terminal tasks."""
