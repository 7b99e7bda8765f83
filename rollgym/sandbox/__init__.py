"""Sandboxes for untrusted code, with explicit isolation levels."""
