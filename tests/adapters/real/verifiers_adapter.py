"""Run with verifiers' Python: its task sets in rollgym; prints what happened.

Two task sets are in ``verifiers_packages``; the third is TextArena's, which is part of verifiers, with a list
of words that is made here in place of NLTK's.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import rollgym
from rollgym.core.errors import RollgymError

HANGMAN = {"game": "Hangman-v0", "max_tasks": 140, "max_turns": 8}
GAMES = {"vf-sums": {"largest": 30}, "vf_hidden": {"max_turns": 4}, "textarena": HANGMAN}


def make_words(folder):
    """Write a corpus of short words where NLTK looks for its own."""
    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True)
    words = "\n".join("".join(letters) for letters in itertools.product("bcd", "aeo", "lnt", "e"))
    for name in ("en", "en-basic"):
        (corpus / name).write_text(f"{words}\n")
    os.environ["NLTK_DATA"] = str(folder)


def run(name, options, folder):
    # Several at once: on a busy machine an episode mostly waits for its turn on a core, twice per reply.
    results = rollgym.evaluate(
        f"verifiers:{name}",
        "random",
        episodes=100,
        split="train",
        workers=1,
        concurrency=10,
        env_kwargs=options,
        out=folder,
    )
    return {
        episode.spec.episode_id: [
            str(episode.outcome),
            [(t.observation, t.action, t.reward) for t in episode.turns],
        ]
        for episode in results.episodes
    }


def play(name, actions, task=0, **options):
    """The observations, rewards and flags of one episode."""
    env = rollgym.make(f"verifiers:{name}", **options)
    try:
        steps = [env.reset(seed=3, options={"split": "train", "task": task})[0]]
        for action in actions:
            steps.append(env.step(action))
            if steps[-1][2] or steps[-1][3]:
                break
        return steps
    except RollgymError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        env.close()


def refusal(name, **options):
    """The error of an environment that cannot be made."""
    try:
        rollgym.make(f"verifiers:{name}", **options).close()
    except RollgymError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main():
    out = Path(sys.argv[1])
    make_words(out / "nltk")
    same = {}
    for name, options in GAMES.items():
        first, second = (run(name, options, out / f"{name}-{part}") for part in "ab")
        turns = sum(len(turns) for _, turns in first.values())
        same[name] = [first == second, len(first), sorted({outcome for outcome, _ in first.values()}), turns]

    env = rollgym.make("verifiers:vf-sums", largest=30)
    sizes = dict(env.unwrapped.tasks.splits)
    starts = {
        split: [env.reset(seed=0, options={"task": task, "split": split})[0] for task in range(size)]
        for split, size in sizes.items()
    }
    names = [env.unwrapped.tasks.name]
    names += [rollgym.make("verifiers:vf-sums", largest=largest).unwrapped.tasks.name for largest in (30, 31)]
    last_digit = int(play("vf_hidden", [], task=60)[0].split()[3].rstrip("."))
    print(
        json.dumps(
            {
                "same": same,
                "sizes": sizes,
                "starts": starts,
                "names": names,
                "instructions": env.unwrapped.instructions,
                "sum": play("vf-sums", ["x"], largest=0, splits={"train": 1}),
                "right": play("vf-sums", ["0"], largest=0, splits={"train": 1}),
                "broken": play("vf-sums", ["boom"], largest=0, splits={"train": 1}),
                "hidden": play("vf_hidden", [str(tens * 10 + last_digit) for tens in range(50)], task=60),
                "stop": play("vf_hidden", ["stop"]),
                "limit": play("vf_hidden", ["x", "x", "x"], max_turns=2),
                "refusals": [
                    refusal("vf_nothing"),
                    refusal("vf_classic"),
                    refusal("json"),
                    refusal("vf_tools"),
                    refusal("vf-sums", needs="image"),
                    refusal("vf-sums", larges=3),
                    refusal("vf-sums", largest="many"),
                    refusal("vf-sums", size=2),
                    refusal("vf-sums", splits={"train": 0}),
                    refusal("vf-sums", success_reward="x"),
                    refusal("vf-sums", env_options={"id": "user-sim"}),
                    refusal("rollgym-verifiers"),
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
