"""The parts of the embedded engine (`rollgym.engines.torch` puts them together)."""
