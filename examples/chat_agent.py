"""Evaluate a language model behind an OpenAI-compatible endpoint on a text environment.

python examples/chat_agent.py MODEL --base-url http://localhost:8000/v1
OPENAI_API_KEY=... python examples/chat_agent.py MODEL --env rollgym/Sokoban-v0 --episodes 50

`rollgym eval ENV --agent chat --agent-arg model=MODEL` does the same and records every episode; this file
shows the loop inside.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import rollgym
from rollgym.core.agent import Agent
from rollgym.core.env import text_interface
from rollgym.core.errors import AgentError, RollgymError
from rollgym.core.seeding import derive_seed


async def play(agent: Agent, env_id: str, task: int, turns: int) -> bool | None:
    """Play one episode; returns whether it succeeded, or None if the endpoint failed."""
    env = rollgym.make(env_id)
    spec = rollgym.EpisodeSpec(
        episode_id=f"task-{task}", env_id=env_id, task=task, split="test", sampling_seed=derive_seed(task)
    )
    player = agent.player(rollgym.Briefing(spec=spec, instructions=text_interface(env).instructions))
    observation, info = env.reset(seed=task, options={"task": task, "split": "test"})
    try:
        for _ in range(turns):
            move = await player.act(observation, info)
            action = move if isinstance(move, str) else move.action
            observation, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                break
    except AgentError as error:
        print(f"task {task}: {error}")
        return None
    finally:
        env.close()
    return bool(info["success"])


async def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Play all tasks with bounded concurrency and count successes."""
    agent: Any = rollgym.make_agent(
        "chat",
        rollgym.AgentSetup(env_id=options.env),
        model=options.model,
        base_url=options.base_url,
        template="reason",
    )
    slots = asyncio.Semaphore(options.concurrency)

    async def play_one(task: int) -> bool | None:
        async with slots:
            return await play(agent, options.env, task, options.turns)

    results = await asyncio.gather(*(play_one(task) for task in range(options.episodes)))
    await agent.close()
    scored = [result for result in results if result is not None]
    return {"episodes": len(results), "scored": len(scored), "successes": sum(scored), **agent.totals()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Evaluate a language model on a text environment.")
    parser.add_argument("model")
    parser.add_argument("--base-url", help="default: OPENAI_BASE_URL")
    parser.add_argument("--env", default="rollgym/FrozenLake-v0")
    for name, default in (("episodes", 20), ("turns", 30), ("concurrency", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    try:
        for key, value in asyncio.run(evaluate(parser.parse_args())).items():
            print(f"{key:18} {value}")
    except RollgymError as problem:
        raise SystemExit(f"{problem}") from None
