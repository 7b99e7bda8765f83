"""A black-box agent that needs nothing but Python: one pull at one of two machines, and what it paid.

It knows the address of a model and the number of its task. `rollgym.trainer.program` runs it for every
episode of a training run, and the model behind the address learns which machine to name (docs/serve.md).
"""

import http.client
import json
import os
import random
import sys
from urllib.parse import urlsplit

MACHINES = {"Lantern": (1.0, 0.4), "Comet": (0.6, 1.0)}
"""How likely each is to pay, and how much: Comet is worth 0.6 on average, Lantern 0.4."""


def ask(text: str) -> str:
    """The model's answer to one message: what an OpenAI client does, without one."""
    where = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
    }
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
    }
    connection = http.client.HTTPConnection(where.netloc)
    connection.request("POST", f"{where.path}/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"the model answered {answer.status}")
    text = json.load(answer)["choices"][0]["message"]["content"]
    connection.close()
    return text.strip()


def play(seed: int) -> dict[str, object]:
    """One pull: what it paid, and whether it was at the better machine."""
    luck = random.Random(seed)
    names = luck.sample(sorted(MACHINES), k=2)
    name = ask(f"Machines: {', '.join(names)}. Turns left: 1.")
    chance, amount = MACHINES.get(name, (0.0, 0.0))
    return {"reward": amount if luck.random() < chance else 0.0, "success": name == "Comet"}


if __name__ == "__main__":
    print(json.dumps(play(int(json.load(sys.stdin).get("env_seed") or 0))))
