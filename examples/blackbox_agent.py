"""A black-box agent: it knows only the URL of an OpenAI-compatible endpoint and its task.

Play one game of FrozenLake against a served model:

    rollgym model new rollgym/FrozenLake-v0 --out models/lake
    rollgym serve models/lake --port 8000 --env rollgym/FrozenLake-v0
    echo '{"task": 7}' | OPENAI_BASE_URL=http://127.0.0.1:8000/session/game-7/v1 OPENAI_MODEL=lake \
        python examples/blackbox_agent.py

Or let `rollgym.serve.SubprocessAgent` run it for every episode (docs/blackbox.md), with sandbox="none", since
a sandbox hides rollgym: it sets the variables, writes the task to standard input and reads the reward from
the last line of output.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

import rollgym
from rollgym.core.env import text_interface

TURNS = 12


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post JSON and return the JSON response, as an OpenAI client does."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        values: dict[str, Any] = json.load(response)
    return values


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's reply."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 8}
    completion = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)
    text: str = completion["choices"][0]["message"]["content"]
    return text


def play(task: dict[str, Any]) -> dict[str, Any]:
    """Play one game with the agent's own loop, which could be any program."""
    env = rollgym.make(task.get("env_id", "rollgym/FrozenLake-v0"), **task.get("env_kwargs", {}))
    options = {"task": task.get("task") or 0, "split": task.get("split", "train")}
    observation, info = env.reset(seed=task.get("env_seed", 0), options=options)
    messages = [{"role": "system", "content": text_interface(env).instructions}]
    total = 0.0
    for _ in range(TURNS):
        messages.append({"role": "user", "content": observation})
        messages.append({"role": "assistant", "content": ask(messages)})
        observation, reward, terminated, truncated, info = env.step(messages[-1]["content"])
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    return {"reward": total, "success": bool(info["success"])}


if __name__ == "__main__":
    result = play(json.load(sys.stdin))
    if "ROLLGYM_SESSION" not in os.environ:  # started by hand: report the result
        post(os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/end", result)
    print(json.dumps(result))
