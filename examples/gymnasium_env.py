"""Play one of Gymnasium's own environments by text: `python examples/gymnasium_env.py`."""

import gymnasium as gym
import numpy as np

import rollgym
from rollgym.text import text_face


def play(env: gym.Env[str, str], seed: int) -> float:
    """Print one episode of random actions and return the sum of its rewards."""
    face = text_face(env)
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        action = face.random_action(observation, info, rng)
        before = observation
        observation, reward, terminated, truncated, info = env.step(action)
        print(f"{before:>3}  {action:<6} -> {observation:>3}   reward {reward:g}")
        total += float(reward)
        over = terminated or truncated
    return total


def main() -> None:
    # `make` adapts what does not speak text. CliffWalking has no turn limit of its own, so give it one.
    env = rollgym.make("CliffWalking-v1", max_episode_steps=15)
    print(text_face(env).instructions, "\n")
    print(f"The rewards add up to {play(env, seed=0):g}.\n")

    # Text that is no action is answered, not raised.
    env.reset(seed=0)
    observation, reward, _, _, info = env.step("jump")
    print(f"{observation}\n(valid: {info['valid']}, reward {reward:g})")
    env.close()


if __name__ == "__main__":
    main()
