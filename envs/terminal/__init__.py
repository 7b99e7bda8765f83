"""Terminal tasks: a shell in a sandbox, files to work on, hidden checks."""
