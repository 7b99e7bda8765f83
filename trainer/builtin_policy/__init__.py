"""The built-in policy: a small transformer and tokenizer for given environments."""
