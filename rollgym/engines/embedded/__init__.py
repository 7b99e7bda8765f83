"""The parts of the embedded engine (`rollgym.engines.embedded.engine` puts them together)."""
