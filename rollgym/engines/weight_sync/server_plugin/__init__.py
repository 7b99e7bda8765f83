"""Modules that SGLang and vLLM servers import: this folder is on their PYTHONPATH, rollgym is not."""
