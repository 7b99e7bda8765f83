"""Modules that a vLLM server imports: this folder is on its PYTHONPATH, rollgym is not."""
