"""rollgym: an agentic environment gym with an embedded trainer.

``import rollgym`` registers every environment with Gymnasium and imports no torch, ray or transformers.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# `python -m rollgym` puts the current folder first on the path, where its files and plugins would be taken
# for installed ones. Modules in it are found all the same when a command names them (`rollgym.trust`).
if sys.argv[:1] == ["-m"] and sys.path[:1] in ([""], [os.getcwd()]) and not sys.flags.safe_path:
    del sys.path[0]

if TYPE_CHECKING:
    from rollgym.adapt import adapt
    from rollgym.agent import (
        Agent,
        AgentSetup,
        Briefing,
        Move,
        Player,
        SoloAgent,
        make_agent,
        register_agent,
    )
    from rollgym.registry import cards, make, register
    from rollgym.tasks import Task, TaskSet
    from rollgym.text import Reply, TextEnv, TextSpace
    from rollgym.types import Episode, EpisodeSpec, Group, Limits, Outcome, Turn

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentSetup",
    "Briefing",
    "Episode",
    "EpisodeSpec",
    "Group",
    "Limits",
    "Move",
    "Outcome",
    "Player",
    "Reply",
    "SoloAgent",
    "Task",
    "TaskSet",
    "TextEnv",
    "TextSpace",
    "Turn",
    "adapt",
    "cards",
    "make",
    "make_agent",
    "register",
    "register_agent",
]

_HOMES = {
    "adapt": ("adapt",),
    "agent": (
        "Agent",
        "AgentSetup",
        "Briefing",
        "Move",
        "Player",
        "SoloAgent",
        "make_agent",
        "register_agent",
    ),
    "registry": ("cards", "make", "register"),
    "tasks": ("Task", "TaskSet"),
    "text": ("Reply", "TextEnv", "TextSpace"),
    "types": ("Episode", "EpisodeSpec", "Group", "Limits", "Outcome", "Turn"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Find a public name in the module it lives in, the first time it is asked for."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rollgym' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rollgym.{_HOME_OF[name]}"), name)
    # `rollgym.adapt` is a module as well as a function in it: the function is what the name means.
    globals()[name] = value
    return value


def _only_help_is_wanted() -> bool:
    """The help of the ``rollgym`` command needs no environment, and should not wait for Gymnasium."""
    words = sys.argv[1:]
    completing = "_ROLLGYM_COMPLETE" in os.environ  # a shell asks, possibly for names of environments
    asked = not words or any(word in ("-h", "--help", "-V", "--version") for word in words)
    return Path(sys.argv[0] if sys.argv else "").name == "rollgym" and asked and not completing


if not _only_help_is_wanted():
    from rollgym.adapt import adapt
    from rollgym.registry import load_plugins as _load_plugins
    from rollgym.registry import register_built_in as _register_built_in

    _register_built_in()
    _load_plugins()
