"""Run with MiniWoB's Python: its pages in rollgym's browser; prints what happened."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import rollgym
from rollgym.adapters.miniwob_page import ACTION_MS
from rollgym.core.errors import RollgymError
from rollgym.core.failures import outcome_of

TASKS = ("click-button", "enter-text", "choose-list", "click-link")
TURNS = 5
NETWORK = """async (port) => {
  const found = [];
  for (const url of ['http://example.com/', `http://127.0.0.1:${port}/`, 'file:///etc/passwd']) {
    try { await fetch(url, {mode: 'no-cors'}); found.push(url); } catch (error) { }
  }
  const socket = await new Promise((done) => {
    try {
      const opened = new WebSocket(`ws://127.0.0.1:${port}/`);
      opened.onopen = () => done('open'); opened.onerror = () => done('error');
    } catch (error) { done('refused'); }
  });
  const image = await new Promise((done) => {
    const picture = new Image();
    picture.onload = () => done('shown'); picture.onerror = () => done('error');
    picture.src = `http://127.0.0.1:${port}/x.png`;
  });
  return [found, socket, image, typeof RTCPeerConnection];
}"""


def sentence(name, **options):
    """The error of an environment that cannot be made."""
    try:
        rollgym.make(name, **options)
    except RollgymError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(name, folder):
    results = rollgym.evaluate(
        f"miniwob:{name}", "random", episodes=100, workers=1, env_kwargs={"max_turns": TURNS}, out=folder
    )
    return {
        episode.spec.episode_id: [
            str(episode.outcome),
            [(t.observation, t.action, t.reward) for t in episode.turns],
        ]
        for episode in results.episodes
    }


def repeated(out):
    found = {}
    for number, name in enumerate(TASKS):
        first, second = (run(name, out / f"{number}{part}") for part in "ab")
        rewards = [turns[-1][2] for _, turns in first.values()]
        outcomes = sorted({outcome for outcome, _ in first.values()})
        found[name] = [first == second, len(first), outcomes, min(rewards), max(rewards)]
    return found


def line_of(observation, text):
    """The reference of the element with this text."""
    lines = (line.strip() for line in observation.splitlines())
    return next(line for line in lines if line.startswith("[") and text in line).partition("]")[0][1:]


def one(env, task):
    """Solve a task of each kind, and fail at it; returns observations, rewards, flags and success."""
    seen, info = env.reset(seed=0, options={"task": task})
    wanted = info["instruction"]
    match env.unwrapped.tasks.name.split()[0]:
        case "miniwob:click-button":
            button = f'button "{wanted.split(chr(34))[1]}"'
            plan = [lambda page: f"click[{line_of(page, button)}]"]
        case "miniwob:enter-text":
            word = wanted.split('"')[1]
            plan = [
                lambda page: f"type[{line_of(page, 'textbox')}][wrong]",
                lambda page: f"type[{line_of(page, 'textbox')}][{word}]",
                lambda page: f"click[{line_of(page, 'Submit')}]",
            ]
        case _:
            word = wanted.removeprefix("Select ").partition(" from the list")[0]
            plan = [
                lambda page: f"select[{line_of(page, 'combobox')}][{word}]",
                lambda page: f"click[{line_of(page, 'Submit')}]",
            ]
    for choose in plan:
        seen, reward, terminated, truncated, info = env.step(choose(seen))
    return [reward, terminated, truncated, info["success"]]


def solved():
    found = {}
    for name in TASKS[:3]:
        env = rollgym.make(f"miniwob:{name}")
        found[name] = [one(env, task) for task in range(3)]
        env.close()
    return found


def refused(env):
    """Impossible actions: valid, reward and the first line of the observation."""
    env.reset(seed=0, options={"task": 0})
    found = {}
    for action in ("", "search[x]", "click[e99]", "type[e2][x]", "select[e1][x]", "press[F13]"):
        seen, reward, *_, info = env.step(action)
        found[action] = [info["valid"], reward, seen.splitlines()[0]]
    seen, *_ = env.step(f"type[e1][{'x' * 201}]")
    return {**found, "long": [env.step("type[e1][]")[4]["valid"], 0.0, seen.splitlines()[0]]}


def unlimited():
    """The page's own limit of ten seconds does not end an episode; max_turns does."""
    env = rollgym.make("miniwob:enter-text", max_turns=15)
    env.reset(seed=0)
    flags = [env.step("press[Tab]")[2:4] for _ in range(15)]
    env.close()
    return [ACTION_MS * 15, flags[:-1] == [(False, False)] * 14, flags[-1]]


def network(env):
    env.reset(seed=0)
    seat = env.unwrapped._seat
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        port = other.getsockname()[1]
        tab = seat.require_tab()
        found = seat.call(lambda: tab.page.evaluate(NETWORK, port))
        try:
            other.accept()
            found.append("connected")
        except BlockingIOError:
            found.append("nothing arrived")
    # A link or a script that leaves the page does not: the episode goes on.
    seat.call(lambda: tab.page.evaluate("() => { location.href = 'http://example.com/'; }"))
    found.append(env.step("press[Tab]")[4]["valid"])
    return found


def browsers():
    """Process ids of the browser that this process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
                parents, pid = [], int(entry.name)
                while pid > 1:
                    pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                    parents.append(pid)
            except OSError:
                continue
            if b"--remote-debugging-pipe" in line and b"--type=" not in line and os.getpid() in parents:
                found.append(int(entry.name))
    return found


def killed(env):
    first, _ = env.reset(seed=0)
    for pid in browsers():
        os.kill(pid, signal.SIGKILL)
    try:
        env.step("press[Tab]")
        outcome = ""
    except RollgymError as error:
        outcome = f"{type(error).__name__} {outcome_of(error)}"
    return [outcome, env.reset(seed=0)[0] == first]


def main():
    out = Path(sys.argv[1])
    many, few = rollgym.make("miniwob:click-link"), rollgym.make("miniwob:click-test")
    texts = {
        split: {many.reset(seed=0, options={"task": task, "split": split})[0] for task in range(12)}
        for split in ("train", "test")
    }
    start = few.reset(seed=0, options={"task": 0, "split": "test"})[0]
    many.close()
    few.close()
    env = rollgym.make("miniwob:enter-text")
    found = {
        "solved": solved(),
        "refused": refused(env),
        "unlimited": unlimited(),
        "network": network(env),
        "killed": killed(env),
        "shared": len(texts["train"] & texts["test"]),
        "distinct": len(texts["train"]),
        "few": start,
        "png": env.unwrapped.screenshot()[:4].hex(),
        "imported": [name for name in ("miniwob", "selenium") if name in sys.modules],
        "unknown": sentence("miniwob:click-buton"),
        "option": sentence("miniwob:click-button", max_turns=0),
        "fingerprint": env.unwrapped.tasks.name,
    }
    env.close()
    found["same"] = repeated(out)
    print(json.dumps(found))


main()
