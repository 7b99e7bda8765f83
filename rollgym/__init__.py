"""rollgym: reinforcement learning environments and a trainer for LLM agents.

``import rollgym`` registers every environment with Gymnasium and imports no torch, ray or transformers. The
names in ``__all__`` are the public Python API; each is imported from its module on first use.

    import rollgym

    results = rollgym.evaluate("rollgym/Sokoban-v0", "expert", episodes=20)
    print(results.summary["success_rate"])
"""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

# `python -m rollgym` puts the current folder first on the path, where its files and plugins would be taken
# for installed ones. Modules in it are still found when a command names them (`rollgym.core.trust`).
if sys.argv[:1] == ["-m"] and sys.path[:1] in ([""], [os.getcwd()]) and not sys.flags.safe_path:
    del sys.path[0]

from rollgym.core.extras import require as _require
from rollgym.core.renamed import NAMES as _RENAMED
from rollgym.core.renamed import RenamedModules as _RenamedModules
from rollgym.core.renamed import renamed as _renamed
from rollgym.core.version import __version__ as __version__

if TYPE_CHECKING:
    from rollgym.adapters.gymnasium import adapt
    from rollgym.checks.report import Report
    from rollgym.checks.runner import check
    from rollgym.core.agent import (
        Agent,
        AgentAction,
        AgentInfo,
        AgentSetup,
        Briefing,
        Player,
        SoloAgent,
        list_agents,
        make_agent,
        register_agent,
    )
    from rollgym.core.env import StepResult, TextEnv, TextSpace
    from rollgym.core.errors import RollgymError, RunError, UsageError
    from rollgym.core.messages import Message, ToolCall, ToolSpec
    from rollgym.core.registry import EnvInfo, list_envs, make, register
    from rollgym.core.role_env import RoleEnv
    from rollgym.core.roles import role_trajectory
    from rollgym.core.tasks import Task, TaskSet
    from rollgym.core.tool_env import ToolEnv
    from rollgym.core.tools import tool
    from rollgym.core.types import Episode, EpisodeSpec, Group, Limits, Outcome, RoleSpec, Turn
    from rollgym.evaluation.api import evaluate
    from rollgym.evaluation.run_results import RunResults, load_run
    from rollgym.trainer.dpo.main import adpo, dpo
    from rollgym.trainer.main import atrain, train
    from rollgym.trainer.sft.main import asft, sft

_HOMES = {
    "adapters.gymnasium": "adapt",
    "checks.report": "Report",
    "checks.runner": "check",
    "core.agent": "Agent AgentAction AgentInfo AgentSetup Briefing Player SoloAgent list_agents make_agent "
    "register_agent",
    "core.env": "StepResult TextEnv TextSpace",
    "core.errors": "RollgymError RunError UsageError",
    "core.messages": "Message ToolCall ToolSpec",
    "core.registry": "EnvInfo list_envs make register",
    "core.role_env": "RoleEnv",
    "core.roles": "role_trajectory",
    "core.tasks": "Task TaskSet",
    "core.tool_env": "ToolEnv",
    "core.tools": "tool",
    "core.types": "Episode EpisodeSpec Group Limits Outcome RoleSpec Turn",
    "evaluation.api": "evaluate",
    "evaluation.run_results": "RunResults load_run",
    "trainer.dpo.main": "adpo dpo",
    "trainer.main": "atrain train",
    "trainer.sft.main": "asft sft",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Agent",
    "AgentAction",
    "AgentInfo",
    "AgentSetup",
    "Briefing",
    "EnvInfo",
    "Episode",
    "EpisodeSpec",
    "Group",
    "Limits",
    "Message",
    "Outcome",
    "Player",
    "Report",
    "RoleEnv",
    "RoleSpec",
    "RollgymError",
    "RunError",
    "RunResults",
    "SoloAgent",
    "StepResult",
    "Task",
    "TaskSet",
    "TextEnv",
    "TextSpace",
    "ToolCall",
    "ToolEnv",
    "ToolSpec",
    "Turn",
    "UsageError",
    "adapt",
    "adpo",
    "asft",
    "atrain",
    "check",
    "dpo",
    "evaluate",
    "list_agents",
    "list_envs",
    "load_run",
    "make",
    "make_agent",
    "register",
    "register_agent",
    "role_trajectory",
    "sft",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name in _RENAMED:
        # Not an AttributeError: `from rollgym import NAME` would replace its message.
        raise ImportError(_renamed(f"rollgym.{name}", f"rollgym.{_RENAMED[name]}"), name=name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rollgym' has no attribute {name!r}")
    if _HOME_OF[name].startswith("trainer.") and importlib.util.find_spec("yaml") is None:
        return _needs_training
    value = getattr(importlib.import_module(f"rollgym.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def _needs_training(*args: Any, **kwargs: Any) -> None:
    """Raise `MissingExtra`: stands for the trainer's functions, which ``help(rollgym)`` looks up as well."""
    _require("Training", "train")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


from rollgym.adapters import install as _install_adapters  # noqa: E402
from rollgym.core.agent import set_builtin_agents as _set_builtin_agents  # noqa: E402
from rollgym.core.registry import load_plugins as _load_plugins  # noqa: E402
from rollgym.envs import register_all as _register_envs  # noqa: E402


def _register_agents() -> None:
    from rollgym.agents import register_all

    register_all()


sys.meta_path.insert(0, _RenamedModules())
_install_adapters()
_register_envs()
_set_builtin_agents(_register_agents)
_load_plugins()
