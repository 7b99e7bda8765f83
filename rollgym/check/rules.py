"""All rules, in the order they are checked."""

from __future__ import annotations

from rollgym.check.actions import ends, in_range, nonsense
from rollgym.check.leak import leak
from rollgym.check.lifecycle import after_end, before_reset, close, gymnasium_rule, runs
from rollgym.check.players import expert, instructions, random_agent
from rollgym.check.processes import processes
from rollgym.check.repeat import copies, deterministic, global_rng, siblings
from rollgym.check.report import Rule
from rollgym.check.variety import seeds, tasks

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
        "A result that cannot be repeated can be neither trusted nor debugged.",
        deterministic,
    ),
    Rule(
        "global-rng",
        "leaves global random generators alone",
        "Many episodes share a process: one must not change the chances of another.",
        global_rng,
    ),
    Rule(
        "processes",
        "same episode in another process",
        "Episodes are spread over workers, and which worker plays one must not matter.",
        processes,
        _REPEATS,
    ),
    Rule(
        "siblings",
        "siblings start equal",
        "GRPO compares the episodes of a group: they must start from the same state.",
        siblings,
        _REPEATS,
    ),
    Rule(
        "copies",
        "what it returns is not its own state",
        "Whoever keeps or changes an observation or info must not change the episode.",
        copies,
        _REPEATS,
    ),
    Rule(
        "seeds",
        "different seeds differ",
        "With a single episode an agent learns it by heart and the score says nothing.",
        seeds,
    ),
    Rule(
        "tasks",
        "tasks are reachable by number",
        "Training and test tasks are named by split and number, so they can be kept apart and compared.",
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
        "Rewards after the end would be counted for an episode that is over.",
        after_end,
    ),
    Rule(
        "close",
        "can be closed, and twice",
        "Cleaning up after an error must not raise another one.",
        close,
    ),
    Rule(
        "leak",
        "many episodes leave nothing behind",
        "A worker plays for days: what grows with each episode ends in a crash.",
        leak,
    ),
    Rule(
        "instructions",
        "instructions say how to act",
        "They are all that a language model is told about the task.",
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
