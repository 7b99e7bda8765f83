"""A tool-using agent of openai-agents that walks over a frozen lake. It is trained as it is.

It needs a virtual environment with openai-agents (`python3 -m venv agents-venv` and
`agents-venv/bin/pip install openai-agents==0.24.0`); rollgym is not needed there. The lake is an MCP server,
and the agent sees its observations but no reward. docs/blackbox.md has the commands that train it.
"""

from __future__ import annotations

from typing import Any

from agents.mcp import MCPServerStreamableHttp  # noqa: TID251
from openai import AsyncOpenAI

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, set_tracing_disabled  # noqa: TID251 - the package openai-agents

MAX_TURNS = 20
# The clients' defaults are 5 seconds. On a busy machine they would show the model a failed tool call.
TIMEOUT = 300.0
set_tracing_disabled(True)


async def play(episode: Any) -> None:
    """Play one episode: `episode` is a `rollgym.serve.ProgramEpisode`."""
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0, timeout=TIMEOUT)
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    lake = {"url": episode.task["mcp_url"], "headers": headers, "timeout": TIMEOUT}
    async with MCPServerStreamableHttp(
        params=lake, cache_tools_list=True, client_session_timeout_seconds=TIMEOUT
    ) as server:
        agent = Agent(
            name="Walker",
            instructions=f"{episode.task['instructions']}\n\nAct by calling the tools that you are given.",
            model=OpenAIChatCompletionsModel(model=episode.model, openai_client=client),
            mcp_servers=[server],
        )
        try:
            await Runner.run(agent, episode.task["observation"], max_turns=MAX_TURNS)
        except AgentsException as error:
            print(f"The agent gave up: {error}")
