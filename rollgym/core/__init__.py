"""Core types and contracts: episodes, errors, environments, agents, registry."""
