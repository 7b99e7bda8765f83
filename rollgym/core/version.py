"""The version of rollgym."""

__version__ = "0.2.0"
