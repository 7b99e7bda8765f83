"""``rollgym envs`` and ``rollgym agents``: what there is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rollgym.cli.common import AgentModules, AsJson, EnvModules, console, import_modules
from rollgym.cli.output import print_json

if TYPE_CHECKING:
    from rollgym.registry import EnvCard

EPILOG = "Example: rollgym envs --json | jq '.[].id'"
AGENTS_EPILOG = "Example: rollgym agents"


def envs(env_module: EnvModules = None, as_json: AsJson = False) -> None:
    """List the environments.

    For each: what it is about, its splits, its rewards and what it needs.
    """
    from rich.table import Table

    from rollgym.registry import cards

    import_modules(env_module)
    rows = [_describe(card) for card in cards()]
    if as_json:
        print_json(rows)
        return
    table = Table("id", "what", "splits", "reward per turn", "expert", "needs", box=None, pad_edge=False)
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
    console().print("\nEvery Gymnasium id works too (CartPole-v1), and module:Class.", style="dim")


def _describe(card: EnvCard) -> dict[str, Any]:
    from rollgym.errors import RollgymError
    from rollgym.registry import make
    from rollgym.text import text_face

    row: dict[str, Any] = {
        "id": card.env_id,
        "what": card.summary,
        "splits": {},
        "reward_range": None,
        "expert": card.expert_is if card.expert else None,
        "needs": ", ".join(card.needs),
    }
    try:
        env = make(card.env_id)
    except RollgymError as error:
        return row | {"needs": str(error)}
    face = text_face(env)
    row["splits"] = dict(face.tasks.splits) if face.tasks else {}
    row["reward_range"] = [value if math.isfinite(value) else None for value in face.reward_range]
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

    from rollgym.agent import agent_cards

    import_modules(agent_module, "--agent-module")
    if as_json:
        print_json([{"name": card.name, "what": card.summary} for card in agent_cards()])
        return
    table = Table("name", "what", box=None, pad_edge=False)
    for card in agent_cards():
        table.add_row(f"[bold]{card.name}[/]", card.summary)
    console().print(table)
    console().print("\nA function or class of your own works as module:name.", style="dim")
