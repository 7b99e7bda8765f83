"""Families of generated problems: templates with parameters."""
