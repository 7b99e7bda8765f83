"""``rollgym envs`` and ``rollgym agents``: list what is registered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rollgym.utils.cli_options import AgentModules, AsJson, EnvModules, console, import_modules
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rollgym.core.registry import EnvInfo

EPILOG = "Example: rollgym envs --json | jq '.[].id'"
AGENTS_EPILOG = "Example: rollgym agents --json | jq '.[].name'"


def envs(env_module: EnvModules = None, as_json: AsJson = False) -> None:
    """List the environments.

    Shows for each its summary, splits, reward range and the optional dependencies it needs.
    """
    from rich.table import Table

    from rollgym.core.env_prefixes import list_prefixes
    from rollgym.core.registry import list_envs

    import_modules(env_module)
    rows = [_describe(info) for info in list_envs()]
    if as_json:
        print_json(rows)
        return
    table = Table("id", "summary", "splits", "reward per turn", "expert", "needs", box=None, pad_edge=False)
    for row in rows:
        splits = " ".join(f"{name}:{size:,}" for name, size in row["splits"].items())
        table.add_row(
            f"[bold]{row['id']}[/]",
            row["what"],
            splits or "–",
            _range(row["reward_range"]),
            row["expert"] or "–",
            row["needs"] or "nothing",
        )
    console().print(table)
    console().print("\nAny Gymnasium id (CartPole-v1) and module:Class work too.", style="dim")
    console().print("Environments of other libraries, by prefix:", style="dim")
    for prefix in list_prefixes():
        console().print(f"  {prefix.example:<30} {prefix.summary} ({prefix.requirement})", style="dim")


def _describe(info: EnvInfo) -> dict[str, Any]:
    from rollgym.core.env import text_interface
    from rollgym.core.errors import RollgymError
    from rollgym.core.registry import make

    row: dict[str, Any] = {
        "id": info.env_id,
        "what": info.summary,
        "splits": {},
        "reward_range": None,
        "expert": info.expert_is if info.expert else None,
        "needs": ", ".join(info.needs),
    }
    try:
        env = make(info.env_id)
    except RollgymError as error:
        return row | {"needs": str(error)}
    interface = text_interface(env)
    row["splits"] = dict(interface.tasks.splits) if interface.tasks else {}
    row["reward_range"] = [value if math.isfinite(value) else None for value in interface.reward_range]
    env.close()
    return row


def _range(low_high: list[float | None] | None) -> str:
    if low_high is None:
        return "–"
    low, high = low_high
    return f"{'-∞' if low is None else f'{low:g}'} to {'∞' if high is None else f'{high:g}'}"


def agents(agent_module: AgentModules = None, as_json: AsJson = False) -> None:
    """List the agents."""
    from rich.table import Table

    from rollgym.core.agent import list_agents

    import_modules(agent_module, "--agent-module")
    if as_json:
        print_json([{"name": info.name, "what": info.summary} for info in list_agents()])
        return
    table = Table("name", "summary", box=None, pad_edge=False)
    for info in list_agents():
        table.add_row(f"[bold]{info.name}[/]", info.summary)
    console().print(table)
    console().print("\nYour own function or class works as module:name.", style="dim")
