"""Play a Gymnasium environment through text: `python examples/gymnasium_env.py`."""

import gymnasium as gym
import numpy as np

import rollgym
from rollgym.core.env import text_interface


def play(env: gym.Env[str, str], seed: int) -> float:
    """Print one episode of random actions and return the sum of its rewards."""
    interface = text_interface(env)
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        action = interface.random_action(observation, info, rng)
        before = observation
        observation, reward, terminated, truncated, info = env.step(action)
        print(f"{before:>3}  {action:<6} -> {observation:>3}   reward {reward:g}")
        total += float(reward)
        over = terminated or truncated
    return total


def main() -> None:
    # `make` wraps environments without text. CliffWalking has no turn limit, so set one.
    env = rollgym.make("CliffWalking-v1", max_episode_steps=15)
    print(text_interface(env).instructions, "\n")
    print(f"The rewards add up to {play(env, seed=0):g}.\n")

    # Text that is not an action gets feedback instead of an exception.
    env.reset(seed=0)
    observation, reward, _, _, info = env.step("jump")
    print(f"{observation}\n(valid: {info['valid']}, reward {reward:g})")
    env.close()


if __name__ == "__main__":
    main()
