"""Run with OpenEnv's Python: its own client plays a server at the address in argv; prints what it saw."""

import json
import sys

from openenv.core.generic_client import GenericEnvClient

with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    start = env.reset(seed=7)
    again = env.reset(seed=7)
    result, steps = again, 0
    while not result.done:
        result = env.step({"text": ("Right", "Down")[steps % 2]})
        steps += 1
    state = env.state()
print(
    json.dumps(
        {
            "same": start.observation == again.observation,
            "first": start.observation["text"],
            "last": result.observation["text"],
            "reward": result.reward,
            "steps": steps,
            "state": state,
        }
    )
)
