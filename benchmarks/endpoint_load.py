"""Load on the recording endpoint: requests per second, latency and memory, by concurrent sessions.

    python benchmarks/endpoint_load.py [--quick] [--sessions 256] [--turns 8] [--tools] [--out]

Each session is a client with a connection of its own that sends its whole conversation every turn, as agent
programs do, and ends its session after the last one. The engine is scripted and replies at once, so all the
time goes to HTTP, parsing, the chat template, the tokenizer and the recording. The server runs in a process
of its own; latency includes waiting for the other sessions, since all send at once. Memory is the resident
set of the server, before the first request and at its peak. With --tools every request offers a tool and
every reply calls it; with --out episodes and open sessions are written to disk. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollgym.core.messages import ToolCall
from rollgym.engines.base import GenerateRequest, Generation
from rollgym.testing import ScriptedEngine

PLAIN = "Right"
CALL = ToolCall(name="move", arguments={"direction": "right"})
MAP = "@ F F F\nF H F H\nF F F H\nH F F G"
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move one step.",
        "parameters": {"type": "object", "properties": {"direction": {"type": "string"}}},
    },
}


async def serve(folder: Path, out: Path | None, tools: bool) -> None:
    """Serve with a scripted engine until standard input is closed; print the address."""
    from rollgym.chat import ChatTemplate, load_tokenizer
    from rollgym.io.run_dir import RunFolder
    from rollgym.serve import RecordingServer, ServeOptions

    tokenizer: Any = load_tokenizer(folder)
    template = ChatTemplate(tokenizer)
    text = template.tools.format.write([CALL]) if tools else PLAIN
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = InstantEngine(ids, context_length=100_000)
    run = None if out is None else RunFolder.create(out, {"schema": 1, "kind": "serve"})
    options = ServeOptions(max_requests=4096, max_sessions=4096, max_connections=4096)
    async with RecordingServer(engine, template, options, folder=run) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


class InstantEngine(ScriptedEngine):
    """Replies at once, without a turn of the event loop per token, and keeps no requests."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the scripted ids and the end of the turn."""
        ids = (*self._script(request), request.sampling.stop_ids[0])
        spans = ((0, len(ids)),)
        return Generation(
            token_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", version_spans=spans
        )


class Client:
    """A minimal HTTP client on one connection, so that the load costs little itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post JSON and return the JSON response."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        status = await self._reader.readuntil(b"\r\n\r\n")
        length = int(status.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        response: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        if b" 200 " not in status.split(b"\r\n")[0]:
            raise SystemExit(f"The server refused a request: {response}")
        return response

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def session(url: str, name: str, turns: int, tools: bool) -> list[float]:
    """Play one session; return the seconds of each request."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    client = Client(*await asyncio.open_connection(host, int(port)))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Walk to G, past the holes."}]
    messages.append({"role": "user", "content": f"{name}\n{MAP}"})
    seconds = []
    for _ in range(turns):
        body = {"model": "policy", "messages": messages} | ({"tools": [TOOL]} if tools else {})
        began = time.perf_counter()
        response = await client.post(f"/session/{name}/v1/chat/completions", body)
        seconds.append(time.perf_counter() - began)
        message = response["choices"][0]["message"]
        messages.append(message)
        if tools:
            call_id = message["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": MAP})
        else:
            messages.append({"role": "user", "content": MAP})
    await client.post(f"/session/{name}/end", {"reward": 1.0})
    client.close()
    return seconds


def memory(pid: int, field: str) -> float:
    """Return a memory figure of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(url: str, pid: int, sessions: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run this many sessions at once."""
    before, cpu, began = memory(pid, "VmRSS"), cpu_seconds(pid), time.perf_counter()
    plays = (session(url, f"n{sessions}-{i}", args.turns, args.tools) for i in range(sessions))
    found = sorted(seconds for one in await asyncio.gather(*plays) for seconds in one)
    wall = time.perf_counter() - began
    return {
        "sessions": sessions,
        "requests": len(found),
        "requests_per_second": round(len(found) / wall, 1),
        "cpu_ms_per_request": round(1000 * (cpu_seconds(pid) - cpu) / len(found), 2),
        "p50_ms": round(1000 * statistics.median(found), 1),
        "p99_ms": round(1000 * found[int(0.99 * (len(found) - 1))], 1),
        "rss_before_mb": round(before, 1),
        "rss_peak_mb": round(memory(pid, "VmHWM"), 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 and 32 sessions of 3 turns")
    parser.add_argument("--sessions", type=int, default=256, help="largest number of concurrent sessions")
    parser.add_argument("--turns", type=int, default=8, help="requests per session")
    parser.add_argument("--tools", action="store_true", help="offer a tool, and reply with calls")
    parser.add_argument("--out", action="store_true", help="write episodes and open sessions to disk")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        out = Path(args.serve[1]) if args.serve[1] else None
        asyncio.run(serve(Path(args.serve[0]), out, args.tools))
        return
    if args.quick:
        args.sessions, args.turns = 32, 3
    from rollgym.trainer.builtin_policy.model import make_policy

    with tempfile.TemporaryDirectory() as temporary:
        model = make_policy(
            ["rollgym/FrozenLake-v0"], Path(temporary) / "lake", size="tiny", context=256
        ).path
        run = str(Path(temporary) / "run") if args.out else ""
        words = [sys.executable, __file__, "--serve", str(model), run, *(["--tools"] if args.tools else [])]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            url = server.stdout.readline().strip()
            asyncio.run(session(url, "warm-up", 2, args.tools))
            results = []
            for sessions in (1, max(1, args.sessions // 8), args.sessions):
                results.append(asyncio.run(measure(url, server.pid, sessions, args)))
                print(results[-1])
            server.stdin.close()
    last = results[-1]
    print(json.dumps({"benchmark": "endpoint_load", "tools": args.tools, **last, "all": results}))


if __name__ == "__main__":
    main()
