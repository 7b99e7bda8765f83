"""Training behind a program of one's own: it plays, the policy answers, and what was said is trained on.

    async with open_parts(config, folder) as parts, playing(parts, "python my_agent.py") as parts:
        await train(parts, run)

The loop, the scheduler and the learner are those of any run. The program is started for each episode, of
training and of evaluation, and told the task (docs/serve.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollgym.chat import load_tokenizer
from rollgym.errors import UsageError
from rollgym.serve import ProgramPlayer, RecordingServer, ServeOptions
from rollgym.trainer.setup import MODEL, Parts

REQUESTS, SESSIONS = 256, 1024
"""At once, at least: a program may ask several things."""


@asynccontextmanager
async def playing(
    parts: Parts,
    command: Sequence[str] | str,
    timeout: float = 600.0,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Parts]:
    """The same parts with a program for environment and agent, for as long as the block lasts.

    Args:
        parts: Of a run whose engine answers the program.
        command: The program and its arguments.
        timeout: Seconds for an episode whose environment sets no limit.
        cwd: Where the program runs.
        env: Variables for it besides those of `ProgramPlayer`.
    """
    config = parts.config
    if config.warm_start is not None:
        raise UsageError(
            "A program cannot be imitated by a warm start: imitate in a run of its own (`rollgym imitate`), "
            "name its folder final as model.path, and leave warm_start out."
        )
    options = ServeOptions(
        temperature=config.agent.temperature,
        max_tokens=config.agent.max_tokens,
        max_requests=max(REQUESTS, config.rollout.max_in_flight),
        max_sessions=max(SESSIONS, 2 * config.rollout.max_in_flight),
    )
    async with RecordingServer(parts.engine, load_tokenizer(parts.folder / MODEL), options) as server:
        player: Any = ProgramPlayer(server, command, timeout, cwd=cwd, env=env)
        try:
            yield dataclasses.replace(parts, pool=player, agent=player)
        finally:
            await player.close()
