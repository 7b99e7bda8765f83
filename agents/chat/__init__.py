"""The ``chat`` agent: a language model behind any OpenAI-compatible endpoint."""
