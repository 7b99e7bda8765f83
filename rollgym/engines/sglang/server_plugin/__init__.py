"""Modules that an SGLang server imports: this folder is on its PYTHONPATH, rollgym is not."""
