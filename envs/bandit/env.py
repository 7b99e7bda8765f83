"""A multi-armed bandit: find the best machine while playing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.bandit.arms import NAMES, Arm, random_arms, single_arms

_EXPLORE = """\
You stand before {arms} slot machines. One pays clearly better on average than the others.
Each turn, answer with the name of one machine to pull it. Example: {example} (if one is called so)
You see what the pull paid ({pays}). You have {turns} turns; a wrong name wastes a turn.
Your reward is the sum of what your pulls pay. Find the best machine early and keep to it: you succeed
if more than half of the last {late} turns pull the best machine."""
_SINGLE = """\
You stand before two slot machines, Lantern and Comet, and may pull one of them once.
Lantern always pays the same. Comet pays either much or nothing.
Answer with the name of one machine. Example: Lantern
Your reward is what the pull pays. You succeed if you pull the machine that pays more on average."""
_PAYS = {"bernoulli": "1 or 0", "gaussian": "a number that varies around the machine's average"}


class BanditEnv(TextEnv):
    """Pull one of several named machines each turn.

    Observation: the machines' names at first; then one line with the payout and the turns left.

    Actions: the name of a machine, in any case.

    Reward: the payout. A wrong name pays 0.

    Success: more than half of the pulls in the last half of the turns went to the machine with the best
    average. Wrong names count as pulls of another machine.

    Ends: terminated after ``turns`` turns.

    Splits: random names and averages, no such set in two splits. In the mode ``single`` all tasks have
    the same two machines, in either order. Payouts come from the episode's seed.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "more than half of the last half of the turns pulled the best machine"
    tasks: TaskSet

    def __init__(
        self,
        *,
        mode: str = "explore",
        arms: int = 4,
        turns: int = 20,
        payoff: str = "bernoulli",
        render_mode: str | None = None,
    ) -> None:
        """See docs/environments/bandit.md for the options."""
        if mode not in ("explore", "single"):
            raise UsageError(f"mode must be 'explore' or 'single', not {mode!r}.")
        if mode == "single" and (arms, turns, payoff) != (4, 20, "bernoulli"):
            raise UsageError("In the mode 'single', arms, turns and payoff are fixed: leave them out.")
        check_range("arms", arms, 2, 10)
        check_range("turns", turns, 1, 10_000)
        if payoff not in _PAYS:
            raise UsageError(f"payoff must be 'bernoulli' or 'gaussian', not {payoff!r}.")
        self._single = mode == "single"
        self._count, self._turns, self._payoff = arms, 1 if self._single else turns, payoff
        self._late = (self._turns + 1) // 2
        if payoff == "bernoulli":
            self.reward_range = (0.0, 1.0)
        self.instructions = self._explain()
        self.tasks = TaskSet("Bandit-single" if self._single else f"Bandit-{arms}-{payoff}")
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Set up the task's machines."""
        if self._single:
            self._arms = single_arms(task.rng())
        else:
            self._arms = self.tasks.draw(
                task, lambda rng: random_arms(rng, self._count, self._payoff), key=repr
            )
        self._by_name = {arm.name.lower(): arm for arm in self._arms}
        self._best = max(self._arms, key=lambda arm: arm.mean)
        self._pulls = dict.fromkeys((arm.name for arm in self._arms), 0)
        self._totals = dict.fromkeys(self._pulls, 0.0)
        self._left, self._good = self._turns, 0
        return f"{self._menu()} Turns left: {self._left}."

    def respond(self, action: str) -> StepResult:
        """Pull the machine; a wrong name wastes the turn."""
        late = self._left <= self._late
        self._left -= 1
        arm = self._by_name.get(bare(action).lower())
        paid = self._pull(arm) if arm else 0.0
        self._good += late and arm is self._best
        over = self._left == 0
        note = f"{arm.name} paid {paid:g}." if arm else f"There is no such machine. {self._menu()}"
        end = f"No turns left. The best was {self._best.name}." if over else f"Turns left: {self._left}."
        success = over and 2 * self._good > self._late
        return StepResult(f"{note} {end}", paid, terminated=over, success=success, valid=arm is not None)

    def facts(self) -> Mapping[str, Any]:
        """Pulls and total payout per machine, and turns left."""
        return {
            "actions": list(self._pulls),
            "pulls": list(self._pulls.values()),
            "totals": [round(total, 2) for total in self._totals.values()],
            "left": self._left,
        }

    def render_text(self) -> str:
        """One line per machine: its pulls and their payout."""
        lines = (f"{name:8} {n:4} pulls, paid {self._totals[name]:g}" for name, n in self._pulls.items())
        return "\n".join([*lines, f"Turns left: {self._left}."])

    def _pull(self, arm: Arm) -> float:
        paid = arm.pull(self.np_random)
        self._pulls[arm.name] += 1
        self._totals[arm.name] += paid
        return paid

    def _menu(self) -> str:
        return f"Machines: {', '.join(self._pulls)}."

    def _explain(self) -> str:
        if self._single:
            return _SINGLE
        pays = _PAYS[self._payoff]
        return _EXPLORE.format(
            arms=self._count, turns=self._turns, late=self._late, pays=pays, example=NAMES[0]
        )
