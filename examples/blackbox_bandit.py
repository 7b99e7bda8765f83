"""A black-box agent in plain Python: one pull at one of two slot machines.

It knows the URL of a model and the seed of its task. `rollgym.trainer.blackbox` runs it for every episode of
a training run, and the model behind the URL learns which machine to choose (docs/serve.md).
"""

import http.client
import json
import os
import random
import sys
from urllib.parse import urlsplit

MACHINES = {"Lantern": (1.0, 0.4), "Comet": (0.6, 1.0)}
"""Chance and amount of a payout: Comet pays 0.6 on average, Lantern 0.4."""


def ask(text: str) -> str:
    """Return the model's reply to one message, as an OpenAI client does."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
    }
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
    }
    connection = http.client.HTTPConnection(url.netloc)
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"the model responded with status {response.status}")
    text = json.load(response)["choices"][0]["message"]["content"]
    connection.close()
    return text.strip()


def play(seed: int) -> dict[str, object]:
    """Play one pull; success means the better machine."""
    rng = random.Random(seed)
    names = rng.sample(sorted(MACHINES), k=2)
    name = ask(f"Machines: {', '.join(names)}. Turns left: 1.")
    chance, amount = MACHINES.get(name, (0.0, 0.0))
    return {"reward": amount if rng.random() < chance else 0.0, "success": name == "Comet"}


if __name__ == "__main__":
    print(json.dumps(play(int(json.load(sys.stdin).get("env_seed") or 0))))
