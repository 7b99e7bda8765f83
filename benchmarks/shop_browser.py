"""WebShop in a real browser: actions per second, and how much cheaper text is.

    python benchmarks/shop_browser.py [--quick] [--shop synthetic] [--contexts 1 2 4] [--seconds 20]

The same random episodes are played by the text environment and by browser environments of one process, one
thread each, which share one browser: 1, 2 and 4 at once. An action is a click or a search, with the page it
leads to read as an accessibility tree; resets (a new browser context) are timed with them, and apart. Several
rounds in turn; the median counts. Memory is that of the browser's processes while all contexts are open.
Figures are comparable within a run only: read the ratios. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from rollgym.envs.webshop.browser import WebShopBrowserEnv
from rollgym.envs.webshop.env import WebShopEnv

Script = tuple[int, list[str]]
"""A task and the actions played on it."""


def record(env: WebShopEnv, episodes: int) -> list[tuple[Script, Script]]:
    """Random episodes that buy in the end, as text and as what to do in the browser."""
    rng = np.random.default_rng(0)
    scripts = []
    for number in range(episodes):
        task = int(rng.integers(env.tasks.size("train"))) if env.tasks else 0
        seen, info = env.reset(seed=number, options={"task": task})
        actions, clicks, over = list[str](), list[str](), False
        while not over:
            buy = "buy now" in info["clickables"] and rng.random() < 0.3
            actions.append("click[buy now]" if buy else env.random_action(seen, info, rng))
            clicks.append(in_browser(env, actions[-1]))
            seen, _, terminated, truncated, info = env.step(actions[-1])
            over = terminated or truncated
        scripts.append(((task, actions), (task, clicks)))
    return scripts


def in_browser(env: WebShopEnv, action: str) -> str:
    """The same action in the browser, where things stand in the same order."""
    name, _, argument = action[:-1].partition("[")
    if name == "search":
        return f"type[e1][{argument}]"
    usable = [element for element in env.page.elements if element.key]
    return f"click[e{1 + usable.index(env.page.find(argument) or usable[0])}]"


class Counts:
    """What one thread did."""

    def __init__(self) -> None:
        self.actions = 0
        self.resets: list[float] = []
        self.steps: list[float] = []


def play(env: WebShopEnv, scripts: list[Script], until: float, counts: Counts) -> None:
    """Play scripts until it is time, and check that they do what they did."""
    for task, actions in itertools.cycle(scripts):
        began = time.perf_counter()
        env.reset(options={"task": task})
        counts.resets.append(time.perf_counter() - began)
        for action in actions:
            began = time.perf_counter()
            info = env.step(action)[4]
            counts.steps.append(time.perf_counter() - began)
            assert info["valid"], action
            counts.actions += 1
            if time.perf_counter() > until:
                return


def measure(envs: list[WebShopEnv], scripts: list[Script], seconds: float) -> tuple[float, list[Counts]]:
    """Actions per second of environments that play at the same time, a thread each."""
    all_counts = [Counts() for _ in envs]
    started = time.perf_counter()
    threads = [
        threading.Thread(target=play, args=(env, scripts[n:] + scripts[:n], started + seconds, counts))
        for n, (env, counts) in enumerate(zip(envs, all_counts, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts.actions for counts in all_counts) / (time.perf_counter() - started), all_counts


def browser_memory() -> float:
    """Megabytes of the browser and its driver, which are below this process; shared pages are shared out."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(map(_shared_out, found - {os.getpid()})) / 1024


def _shared_out(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Measure and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shop", default="synthetic")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=20.0, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.rounds = 3.0, 1
    text = WebShopEnv(args.shop)
    scripts = record(text, 50)
    as_text, as_clicks = ([pair[n] for pair in scripts] for n in range(2))
    envs: list[WebShopEnv] = [WebShopBrowserEnv(args.shop) for _ in range(max(args.contexts))]
    for env in envs:
        env.reset(seed=0)  # the browser is there
    memory = browser_memory()
    rates: dict[str, list[float]] = {name: [] for name in ("text", *(f"browser, {n}" for n in args.contexts))}
    times = Counts()
    for _ in range(args.rounds):
        rates["text"].append(measure([text], as_text, min(args.seconds, 3.0))[0])
        for count in args.contexts:
            rate, counts = measure(envs[:count], as_clicks, args.seconds)
            rates[f"browser, {count}"].append(rate)
            if count == 1:
                times.resets += counts[0].resets
                times.steps += counts[0].steps
    for env in envs:
        env.close()
    report(args, {name: statistics.median(found) for name, found in rates.items()}, times, memory)


def report(args: argparse.Namespace, rates: dict[str, float], times: Counts, memory: float) -> None:
    """The table and the JSON line."""
    most = max(rate for name, rate in rates.items() if name != "text")
    print(f"shop {args.shop}, {args.rounds} x {args.seconds:g} s each\n")
    print(f"{'':26}{'actions/s':>10}{'text is x':>12}")
    for name, rate in rates.items():
        print(f"{name:26}{rate:10,.1f}{rates['text'] / rate:12,.0f}")
    print(f"\nbrowser and driver with {max(args.contexts)} contexts: {memory:,.0f} MB")
    result = {
        "benchmark": "shop_browser",
        "shop": args.shop,
        "actions_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "text_to_browser": round(rates["text"] / most),
        "browser_mb": round(memory),
    }
    if times.steps:
        resets, steps = statistics.median(times.resets), statistics.median(times.steps)
        print(f"one context: an action {1000 * steps:.0f} ms, a reset {1000 * resets:.0f} ms (median)")
        result |= {"action_ms": round(1000 * steps), "reset_ms": round(1000 * resets)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
