"""Rewards beyond the environment: an episode is scored as soon as it has ended.

A `Scorer` looks at a finished episode and gives it a `Score`, which is added to the last turn's reward.
Scorers that do: a Python function in worker processes (`rollgym.rewards.function`), a service
(`rollgym.rewards.http`), a language model (`rollgym.rewards.judge`). `Weighted` makes several one, and
`rollgym.rewards.settings` makes them from plain settings.

    Scheduler(stream, pool, agent, scorer=Weighted({"tests": (FunctionScorer("my_rewards:tests"), 0.5)}))
"""

from rollgym.rewards.scoring import Score, Scorer, read_score
from rollgym.rewards.weighted import Weighted, score_episode

__all__ = ["Score", "Scorer", "Weighted", "read_score", "score_episode"]
