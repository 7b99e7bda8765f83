"""All rules, in the order they are checked."""

from __future__ import annotations

from rollgym.checks.actions import ends, in_range, nonsense
from rollgym.checks.agents import expert, instructions, random_agent
from rollgym.checks.determinism import copies, deterministic, global_rng, siblings
from rollgym.checks.leak import leak
from rollgym.checks.lifecycle import after_end, before_reset, close, gymnasium_rule, runs
from rollgym.checks.processes import processes
from rollgym.checks.report import Rule
from rollgym.checks.seeds import seeds, tasks

_REPEATS = ("deterministic",)

RULES: tuple[Rule, ...] = (
    Rule(
        "runs",
        "can be made, reset and stepped",
        "Nothing else can be checked otherwise.",
        runs,
    ),
    Rule(
        "gymnasium",
        "passes Gymnasium's check_env",
        "Every tool that takes a Gymnasium environment then takes this one.",
        gymnasium_rule,
    ),
    Rule(
        "deterministic",
        "same seed, same episode",
        "A result that cannot be reproduced can be neither trusted nor debugged.",
        deterministic,
    ),
    Rule(
        "global-rng",
        "leaves global random generators alone",
        "Many episodes share a process: one must not affect the randomness of another.",
        global_rng,
    ),
    Rule(
        "processes",
        "same episode in another process",
        "Episodes are distributed over workers, and the choice of worker must not matter.",
        processes,
        _REPEATS,
    ),
    Rule(
        "siblings",
        "members of a group start equal",
        "GRPO compares the episodes of a group: they must start from the same state.",
        siblings,
        _REPEATS,
    ),
    Rule(
        "copies",
        "returned values are copies",
        "Code that keeps or changes an observation or info must not change the episode.",
        copies,
        _REPEATS,
    ),
    Rule(
        "seeds",
        "different seeds differ",
        "An agent memorizes a single episode, and its score then means nothing.",
        seeds,
    ),
    Rule(
        "tasks",
        "tasks are reachable by number",
        "Training and test tasks are identified by split and number, so they can be separated and compared.",
        tasks,
        _REPEATS,
    ),
    Rule(
        "range",
        "rewards, flags and infos are in range",
        "One NaN spoils a whole batch, and an info that is not JSON cannot be recorded.",
        in_range,
    ),
    Rule(
        "nonsense",
        "nonsense actions are harmless",
        "Language models write anything, and an exception costs the whole episode.",
        nonsense,
    ),
    Rule(
        "ends",
        "episodes end",
        "An endless episode holds its worker, and the batch, for good.",
        ends,
    ),
    Rule(
        "before-reset",
        "a step before reset() is refused",
        "A wrong order of calls should be an error where it happens.",
        before_reset,
    ),
    Rule(
        "after-end",
        "a step after the end is refused",
        "Rewards after the end would count for an episode that is over.",
        after_end,
    ),
    Rule(
        "close",
        "close() works, also twice",
        "Cleaning up after an error must not raise another one.",
        close,
    ),
    Rule(
        "leak",
        "many episodes leave nothing behind",
        "A worker runs for days: a leak in every episode ends in a crash.",
        leak,
    ),
    Rule(
        "instructions",
        "instructions explain how to act",
        "They are all that a language model knows about the task.",
        instructions,
    ),
    Rule(
        "expert",
        "the expert succeeds",
        "It shows that the tasks can be solved from what an agent sees.",
        expert,
    ),
    Rule(
        "random",
        "random actions are valid and do not win",
        "The random agent is the lower baseline of every comparison.",
        random_agent,
    ),
)
