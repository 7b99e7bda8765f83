"""Training behind a program of one's own: it plays, the policy answers, and what was said is trained on.

    rollgym train my_run.yaml program="python my_agent.py"

The loop, the scheduler and the learner are those of any run. The program is started for each episode, of
training and of evaluation, and told the task (docs/serve.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollgym.chat import load_tokenizer
from rollgym.serve import ProgramPlayer, RecordingServer, ServeOptions
from rollgym.trainer.setup import MODEL, Parts

REQUESTS, SESSIONS = 256, 1024
"""At once, at least: a program may ask several things."""
TIMEOUT = 600.0


@asynccontextmanager
async def playing(parts: Parts, command: str, timeout: float = TIMEOUT) -> AsyncIterator[Parts]:
    """The same parts with a program for environment and agent, for as long as the block lasts.

    Args:
        parts: Of a run whose engine answers the program.
        command: The program and its arguments.
        timeout: Seconds for an episode whose environment sets no limit.
    """
    config = parts.config
    options = ServeOptions(
        temperature=config.agent.temperature,
        fixed_sampling=True,
        max_tokens=config.agent.max_tokens,
        max_requests=max(REQUESTS, config.rollout.max_in_flight),
        max_sessions=max(SESSIONS, 2 * config.rollout.max_in_flight),
    )
    async with RecordingServer(parts.engine, load_tokenizer(parts.folder / MODEL), options) as server:
        player: Any = ProgramPlayer(server, command, timeout)
        try:
            yield dataclasses.replace(parts, pool=player, agent=player)
        finally:
            await player.close()
