"""A tool-using agent of smolagents that walks over a frozen lake. It is trained as it is.

It needs a virtual environment with smolagents (`python3 -m venv agents-venv` and
`agents-venv/bin/pip install 'smolagents[openai]==1.26.0'`); rollgym is not needed there. The tool moves over
HTTP, and the agent sees observations but no reward. smolagents demands a call in every reply and rewrites its
history in every request, so each turn is a training sequence (docs/blackbox.md).
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

MAX_STEPS = 12
# The default system prompt is mostly examples, and longer than the context of a small policy.
PROMPTS = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "{{custom_instructions}}"}


def play(episode: Any) -> None:
    """Play one episode: `episode` is a `rollgym.serve.ProgramEpisode`."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {episode.api_key}"}

    @tool
    def move(direction: str) -> str:
        """Move one cell.

        Args:
            direction: left, down, right or up.
        """
        body = json.dumps({"name": "move", "arguments": {"direction": direction}}).encode()
        request = urllib.request.Request(f"{episode.session_url}/env/step", body, headers)
        with urllib.request.urlopen(request) as response:
            observation: str = json.load(response)["observation"]
        return observation

    model = OpenAIServerModel(
        model_id=episode.model,
        api_base=episode.base_url,
        api_key=episode.api_key,
        client_kwargs={"max_retries": 0},
    )
    agent = ToolCallingAgent(
        tools=[move],
        model=model,
        prompt_templates=PROMPTS,
        instructions=episode.task["instructions"],
        max_steps=MAX_STEPS,
        verbosity_level=0,
    )
    agent.run(episode.task["observation"])
