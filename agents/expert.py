"""The expert that an environment was registered with."""

from __future__ import annotations

from typing import Any

from rollgym.core.agent import Agent, AgentSetup, build_agent
from rollgym.core.errors import UsageError
from rollgym.core.registry import env_info, load_object


def make_expert(setup: AgentSetup, **options: Any) -> Agent:
    """Make the expert (or baseline) that an environment was registered with."""
    path = env_info(setup.env_id).expert
    if path is None:
        raise UsageError(
            f"{setup.env_id} has no expert: register it with expert='module:factory', or use another agent."
        )
    return build_agent(load_object(path, "expert"), "expert", setup, options)
