"""rollgym as a plugin of verifiers: ``vf-eval rollgym-verifiers --env.taskset.env rollgym/Sokoban-v0``.

verifiers finds plugins by the name of a top-level module; the code is in `rollgym.integrations.verifiers`.
"""

from rollgym.integrations.verifiers import ChatHarness, RollgymEnv, RollgymTaskset

__all__ = ["ChatHarness", "RollgymEnv", "RollgymTaskset"]
