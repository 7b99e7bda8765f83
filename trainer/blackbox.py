"""Black-box training: an external program plays the episodes and the policy answers its requests.

    rollgym train my_run.yaml program="python3 my_agent.py"

Loop, scheduler and learner are the same as in any run. The program is started once per training or evaluation
episode, receives the task, and talks to the policy over an endpoint (docs/blackbox.md).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollgym.chat import ChatTemplate, load_tokenizer
from rollgym.serve import Program, RecordingServer, ServeOptions, SubprocessAgent
from rollgym.trainer.runtime import MODEL, Components

REQUESTS, SESSIONS = 256, 1024
"""Minimum number of concurrent requests and sessions: a program may send several requests at once."""
TIMEOUT = 600.0
"""Seconds."""


@asynccontextmanager
async def blackbox_agent(
    components: Components, program: Program, timeout: float = TIMEOUT
) -> AsyncIterator[None]:
    """Replace pool and agent of the components with a program, inside the block.

    A program with reward=environment plays the environments of the pool that it replaces.

    Args:
        components: The components of the run.
        program: The program.
        timeout: Seconds for an episode whose environment sets no limit.
    """
    config = components.config
    options = ServeOptions(
        # A program has the key of one session only: it neither opens nor rewards another one.
        api_key=secrets.token_hex(16),
        temperature=config.agent.temperature,
        fixed_sampling=True,
        max_tokens=config.agent.max_tokens,
        max_requests=max(REQUESTS, config.rollout.max_in_flight),
        max_sessions=max(SESSIONS, 2 * config.rollout.max_in_flight),
        auxiliary=None if program.auxiliary is None else re.compile(program.auxiliary),
        auxiliary_max_tokens=program.auxiliary_max_tokens,
    )
    # The same template options as in imitation: a policy sees the form of tool calls that it was taught.
    template = ChatTemplate(
        load_tokenizer(components.folder / MODEL),
        config.agent.chat_kwargs,
        date=config.agent.date,
        tool_format=config.agent.tool_format,
    )
    async with RecordingServer(components.engine, template, options) as server:
        player: Any = SubprocessAgent(server, program, timeout, envs=components.pool)
        try:
            await player.prepare()
            components.pool = components.agent = components.eval_agent = player
            yield
        finally:
            await player.close()
