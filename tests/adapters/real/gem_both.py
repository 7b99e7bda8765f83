"""Run with GEM's Python: GEM's environments in rollgym, and rollgym's in GEM; prints what happened."""

import json
import random
import sys
from pathlib import Path

import gem

import rollgym
from rollgym.core.errors import RollgymError
from rollgym.integrations.gem import register

GAMES = ("game:GuessTheNumber-v0-random", "game:Mastermind-v0-hard", "game:Minesweeper-v0-easy")


def sentence(name, **options):
    """The error of an environment that cannot be made."""
    try:
        rollgym.make(name, **options)
    except RollgymError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(name, folder):
    results = rollgym.evaluate(f"gem:{name}", "random", episodes=100, workers=1, out=folder)
    return {
        episode.spec.episode_id: [
            str(episode.outcome),
            [(t.observation, t.action, t.reward) for t in episode.turns],
        ]
        for episode in results.episodes
    }


def main():
    out = Path(sys.argv[1])
    same = {}
    for number, name in enumerate(GAMES):
        first, second = (run(name, out / f"{number}{part}") for part in "ab")
        same[name] = [first == second, len(first), sorted({outcome for outcome, _ in first.values()})]

    env = rollgym.make(f"gem:{GAMES[0]}")
    random.seed(1)
    before = random.getstate()
    starts = {
        split: {env.reset(seed=0, options={"task": task, "split": split})[0] for task in range(40)}
        for split in ("train", "test")
    }
    untouched = random.getstate() == before

    gem_id = register("rollgym/FrozenLake-v0")
    theirs = gem.make(gem_id, split="test")
    texts = [theirs.reset(seed=5)[0] for _ in range(2)]
    values = theirs.step(theirs.sample_random_action())
    vector = gem.make_vec([gem_id, gem_id], seed=3)
    observations, _ = vector.reset()
    ours = rollgym.make("rollgym/FrozenLake-v0").reset(seed=5, options={"split": "test"})[0]
    print(
        json.dumps(
            {
                "same": same,
                "shared": len(starts["train"] & starts["test"]),
                "untouched": untouched,
                "unknown": sentence("gem:game:GuessTheNumbr-v0-easy"),
                "option": sentence("gem:game:GuessTheNumber-v0-easy", success_reward="x"),
                "gem_id": gem_id,
                "repeats": texts[0] == texts[1],
                "ends_with_ours": texts[0].endswith(ours),
                "types": [type(value).__name__ for value in values],
                "vector": len(observations),
            }
        )
    )


if __name__ == "__main__":
    main()
