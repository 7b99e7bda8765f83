"""The environment's own expert, found through its registration."""

from __future__ import annotations

from typing import Any

from rollgym.agent import Agent, AgentSetup, build_agent
from rollgym.errors import UsageError
from rollgym.registry import card, load_object


def make_expert(setup: AgentSetup, **options: Any) -> Agent:
    """The expert (or sound baseline) that an environment was registered with."""
    path = card(setup.env_id).expert
    if path is None:
        raise UsageError(
            f"{setup.env_id} has no expert: register it with expert='module:factory', or use another agent."
        )
    return build_agent(load_object(path, "expert"), "expert", setup, options)
