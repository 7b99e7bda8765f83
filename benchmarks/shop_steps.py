"""WebShop's text environment: steps per second, memory per environment, and what pages as text are worth.

    python benchmarks/shop_steps.py [--quick] [--shop synthetic] [--rules clean] [--seconds 5]

The same random episodes are played in one process, on one core: by 1, 100 and 1,000 environments that take
turns; and by one whose pages are rendered as HTML and parsed again by html.parser, twice a step (for the text
and for what can be clicked), as the original does with the slower BeautifulSoup. Several rounds in turn; the
median counts. Figures are comparable within a run only: read the ratios. Memory is that of one more
environment in the middle of an episode, resident and by tracemalloc. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from html.parser import HTMLParser

import numpy as np

from rollgym.envs.webshop.env import WebShopEnv
from rollgym.envs.webshop.html import html
from rollgym.envs.webshop.pages import SEPARATOR

Script = tuple[int, list[str]]
"""A task and the actions played on it."""
COUNTS = (1, 100, 1000)


class Walk(HTMLParser):
    """Text nodes and button names of a document."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tag, self.texts, self.buttons = "", list[str](), list[str]()
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Remember what the next text is in."""
        self.tag = tag

    def handle_data(self, data: str) -> None:
        """Take a text, and the name of a button."""
        if self.tag not in ("style", "title") and data.strip():
            self.texts.append(data.strip())
            if self.tag == "button":
                self.buttons.append(data.lower())


def parsed(env: WebShopEnv) -> tuple[str, list[str]]:
    """The page's text and what can be clicked, by way of HTML."""
    document = html(env.page)
    return SEPARATOR.join(Walk(document).texts), Walk(document).buttons


def record(env: WebShopEnv, episodes: int) -> list[Script]:
    """Random episodes, as they were played."""
    rng = np.random.default_rng(0)
    scripts: list[Script] = []
    for number in range(episodes):
        task = int(rng.integers(env.tasks.size("train")))
        seen, info = env.reset(seed=number, options={"task": task})
        actions, over = list[str](), False
        while not over:
            actions.append(env.random_action(seen, info, rng))
            seen, _, terminated, truncated, info = env.step(actions[-1])
            over = terminated or truncated
        scripts.append((task, actions))
    return scripts


def lane(env: WebShopEnv, scripts: Iterator[Script], after: Callable[[WebShopEnv], object]) -> Iterator[None]:
    """One environment that plays scripts one after the other, a step whenever it is asked."""
    for task, actions in scripts:
        env.reset(options={"task": task})
        after(env)
        for action in actions:
            env.step(action)
            after(env)
            yield


def steps_per_second(
    envs: list[WebShopEnv], scripts: list[Script], seconds: float, after: Callable[[WebShopEnv], object]
) -> float:
    """How many steps a second the environments make, taking turns."""
    lanes = [lane(env, itertools.cycle(scripts[n % len(scripts) :]), after) for n, env in enumerate(envs)]
    steps, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        for one in lanes:
            next(one)
        steps += len(lanes)
    return steps / elapsed


def resident() -> int:
    """Bytes of memory this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def environments(make: Callable[[], WebShopEnv], count: int, script: Script) -> list[WebShopEnv]:
    """So many environments in the middle of an episode."""
    task, actions = script
    envs = [make() for _ in range(count)]
    for env in envs:
        env.reset(options={"task": task})
        for action in actions[: max(len(actions) - 1, 1)]:
            env.step(action)
    return envs


def memory(make: Callable[[], WebShopEnv], script: Script, count: int) -> tuple[float, float]:
    """Kilobytes of one more environment: resident, and as Python counts its own."""
    first = environments(make, 1, script)
    before = resident()
    many = environments(make, count, script)
    grown = (resident() - before) / count / 1000
    tracemalloc.start()
    more = environments(make, count // 10, script)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(env.shop is first[0].shop for env in itertools.chain(many, more))
    return grown, held / len(more) / 1000


def main() -> None:
    """Measure and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shop", default="synthetic")
    parser.add_argument("--rules", default="clean")
    parser.add_argument("--seconds", type=float, default=5.0, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.rounds = 0.5, 1

    def make() -> WebShopEnv:
        return WebShopEnv(args.shop, rules=args.rules)

    scripts = record(make(), 20 if args.quick else 200)
    longest = max(scripts, key=lambda script: len(script[1]))
    grown, held = memory(make, longest, COUNTS[-1])
    pools = {count: [make() for _ in range(count)] for count in COUNTS}
    contenders: dict[str, Callable[[], float]] = {
        f"{count} environments": lambda envs=envs: steps_per_second(envs, scripts, args.seconds, len_of_page)
        for count, envs in pools.items()
    }
    contenders["1, by way of HTML"] = lambda: steps_per_second(pools[1], scripts, args.seconds, parsed)
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, measure in contenders.items():
            rounds[name].append(measure())
    rates = {name: statistics.median(values) for name, values in rounds.items()}
    report(args, rates, grown, held)


def len_of_page(env: WebShopEnv) -> int:
    """The text contender needs no rendering."""
    return len(env.page.blocks)


def report(args: argparse.Namespace, rates: dict[str, float], grown: float, held: float) -> None:
    """The table and the JSON line."""
    one, *_, most, by_html = rates.values()
    print(f"shop {args.shop}, rules {args.rules}, {args.rounds} x {args.seconds:g} s each, one core\n")
    print(f"{'':26}{'steps/s':>10}{'x HTML':>10}")
    for name, rate in rates.items():
        print(f"{name:26}{rate:10,.0f}{rate / by_html:10.2f}")
    print(f"\none more environment: {grown:.1f} kB resident, {held:.1f} kB by tracemalloc")
    result = {
        "benchmark": "shop_steps",
        "shop": args.shop,
        "rules": args.rules,
        "steps_per_second": {name: round(rate) for name, rate in rates.items()},
        "ratio_to_html": round(one / by_html, 2),
        "many_to_one": round(most / one, 2),
        "kb_per_env": round(max(grown, held), 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
