"""Rewards besides the environment's: scorers of finished episodes.

A `Scorer` gives a finished episode a `Score`, which is added to the last turn's reward. Built-in scorers: a
Python function in worker processes (`rollgym.rewards.function`), a web service (`rollgym.rewards.http`) and a
language model (`rollgym.rewards.judge`). `CompositeScorer` combines several, and `rollgym.rewards.settings`
makes them from plain settings.

    scorer = CompositeScorer({"tests": (FunctionScorer("my_rewards:tests"), 0.5)})
    Scheduler(stream, pool, agent, scorer=scorer)
"""

from rollgym.rewards.composite import CompositeScorer, score_episode
from rollgym.rewards.scoring import Score, Scorer, read_score

__all__ = ["Score", "Scorer", "CompositeScorer", "read_score", "score_episode"]
