"""Models on disk: download, GGUF conversion, Hugging Face folders."""
