"""Episodes on their way: from a spec to a finished episode, whatever happens in between."""
