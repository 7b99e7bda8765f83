"""Inference servers over HTTP: what the engines for SGLang and vLLM share (docs/engines.md)."""
