"""Run with verifiers' Python: its own evaluation plays FrozenLake; prints what it recorded.

The model is a script behind an OpenAI-compatible endpoint: it walks the shortest path on the map that the
last message shows.
"""

import json
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from verifiers.v1.cli.eval.main import main as vf_eval

import rollgym
from rollgym.core.seeding import derive_seed

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
ENV, TASKS, ROLLOUTS = "rollgym/FrozenLake-v0", 6, 2
requests = []


def shortest_path(text):
    """The moves from P to G on the map."""
    rows = text.split("\n")
    cells = {(y, x): cell for y, row in enumerate(rows) for x, cell in enumerate(row)}
    (start,) = (place for place, cell in cells.items() if cell == "P")
    waiting, seen = deque([(start, [])]), {start}
    while waiting:
        (y, x), moves = waiting.popleft()
        if cells[y, x] == "G":
            return moves
        for name, (down, right) in MOVES.items():
            place = (y + down, x + right)
            if place not in seen and cells.get(place, "O") != "O":
                seen.add(place)
                waiting.append((place, [*moves, name]))
    raise ValueError(f"no path: {text}")


class Model(BaseHTTPRequestHandler):
    """Answers chat completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        requests.append([self.path, body["model"], [message["role"] for message in body["messages"]]])
        move = shortest_path(body["messages"][-1]["content"])[0]
        message = {"role": "assistant", "content": move}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def expected():
    """The returns and the first observations of the same episodes in rollgym."""
    env, results = rollgym.make(ENV), []
    for task in range(TASKS):
        first, _ = env.reset(seed=derive_seed("verifiers", 0, task), options={"task": task, "split": "test"})
        total, over, text = 0.0, False, first
        while not over:
            text, reward, terminated, truncated, _ = env.step(shortest_path(text)[0])
            total, over = total + reward, terminated or truncated
        results.append([first, total])
    return results


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out = Path(sys.argv[1])
    stdout, sys.stdout = sys.stdout, sys.stderr  # the command prints every trace
    try:
        vf_eval(
            [
                "rollgym-verifiers", "--env.taskset.env", ENV, "--env.taskset.split", "test",
                "-n", str(TASKS), "-r", str(ROLLOUTS), "-m", "scripted", "--no-push", "--no-rich",
                "--client.base-url", f"http://127.0.0.1:{server.server_port}/v1",
                "--client.api-key-var", "ROLLGYM_TEST_KEY", "--output-dir", str(out), "--run.name", "eval",
            ]
        )  # fmt: skip
    finally:
        sys.stdout = stdout
    episodes = [json.loads(line) for line in (out / "eval" / "traces.jsonl").read_text().splitlines()]
    print(json.dumps({"episodes": episodes, "requests": requests, "expected": expected()}))


if __name__ == "__main__":
    main()
