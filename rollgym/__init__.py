"""rollgym: an agentic environment gym with an embedded trainer.

``import rollgym`` registers every environment with Gymnasium and imports no torch, ray or transformers.
"""

from rollgym.adapt import adapt
from rollgym.agent import Agent, AgentSetup, Briefing, Move, Player, SoloAgent, make_agent, register_agent
from rollgym.registry import cards, load_plugins, make, register, register_built_in
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

register_built_in()
load_plugins()
