"""Where every group stands: a pure state machine over tickets, without clock or tasks.

Tickets are handed out in order; their groups finish in any order; ready ones are taken in an order that does
not depend on how long they took. Each ticket ends in exactly one way: taken, dropped or skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollgym.scheduler.config import SchedulerConfig
from rollgym.scheduler.groups import GroupState, GroupStatus
from rollgym.scheduler.stream import TaskStream
from rollgym.types import EpisodeSpec, Group, Turn


@dataclass(frozen=True, slots=True)
class Passed:
    """A group that is not taken, and why: ``dropped``, ``skipped``, or ``stale`` (it is played again)."""

    group_id: str
    why: str


class GroupBoard:
    """Hands out tickets and gives back groups."""

    def __init__(self, stream: TaskStream, config: SchedulerConfig, start: int = 0) -> None:
        self.stream = stream
        self.config = config
        self.next_ticket = start
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.open: dict[int, GroupState] = {}
        """Groups handed out and not yet taken or passed over, by ticket number: in order."""
        self.hand: list[Group] = []
        """Groups chosen, but not yet given to whoever takes them: more are needed, or he gave up waiting."""
        self.holding = False
        """Whether taken groups are released later, by `release`, or at once."""
        self.unreleased = 0
        self._again: list[int] = []
        self._first_attempts: Counter[int] = Counter()
        self._used_attempts: dict[int, int] = {}
        """Of tickets whose groups are in hand."""
        self._overtaken: Counter[int] = Counter()
        self._skipped_in_a_row = 0
        self._farthest = 0
        self._hand_version = 0
        self._passed: list[Passed] = []

    def may_hand_out(self) -> bool:
        """Whether another group may be started."""
        in_hand = len(self.hand) if self.holding else 0
        return len(self.open) + in_hand + self.unreleased < self.config.ahead

    def hand_out(self) -> list[EpisodeSpec]:
        """Start the next group: the first episodes of its members."""
        if self._again:
            number = self._again.pop(0)
        else:
            number, self.next_ticket = self.next_ticket, self.next_ticket + 1
        ticket = self.stream.ticket(number)
        state = GroupState(self.stream, ticket, self.config.groups, self._first_attempts[number])
        in_order = not self.open or number > next(reversed(self.open))
        self.open[number] = state
        if not in_order:
            self.open = dict(sorted(self.open.items()))
        self.counts["handed_out"] += 1
        return state.start()

    def choose(self) -> Group | None:
        """Choose the group to take next, or ``None`` where one must be waited for."""
        for number in list(self.open):
            state = self.open[number]
            if state.status is GroupStatus.OPEN:
                if self.config.order == "strict" or self._must_wait_for(number):
                    return None
                continue
            group = self._judge(number, state)
            if group is not None:
                self._count_overtaken(number)
                self.hand.append(group)
                return group
        return None

    def fresh_in_hand(self) -> int:
        """How many groups are in hand; those that became too old there are to be played again."""
        if self._hand_version != self.version:
            self._hand_version = self.version
            chosen, self.hand = self.hand, []
            for group in chosen:
                if self._too_old(group):
                    self.counts["taken"] -= 1
                    number = int(group.group_id[1:])
                    self._play_later(number, self._used_attempts.pop(number))
                    self._passed.append(Passed(group.group_id, "stale"))
                else:
                    self.hand.append(group)
        return len(self.hand)

    def give(self, count: int) -> list[Group]:
        """Hand over groups that were chosen."""
        groups, self.hand = self.hand[:count], self.hand[count:]
        for group in groups:
            del self._used_attempts[int(group.group_id[1:])]
        self.unreleased += len(groups) if self.holding else 0
        return groups

    def recall(self, number: int) -> list[str]:
        """Play a group under way again from its start; returns its episodes that still play."""
        state = self.open.pop(number)
        self._play_later(number, state.next_attempt)
        return list(state.running)

    def restart(self, number: int, episode_id: str) -> EpisodeSpec:
        """Play one member again from its start; returns the episode to start."""
        spec = self.open[number].restart(episode_id)
        self.counts["restarted"] += 1
        return spec

    def too_old(self, oldest: int | None) -> bool:
        """Whether tokens of this version can no longer be trained on."""
        bound = self.config.max_staleness
        return bound is not None and oldest is not None and self.version - oldest > bound

    def passed_over(self) -> list[Passed]:
        """The groups passed over since the last call."""
        passed, self._passed = self._passed, []
        return passed

    def release(self, count: int) -> None:
        """Groups that were taken are done with: as many new ones may be started."""
        self.unreleased = max(0, self.unreleased - count)

    def overtaken(self) -> list[GroupState]:
        """The groups under way that a later one was taken before."""
        return [state for number, state in self.open.items() if number < self._farthest]

    def tickets_to_play(self) -> list[int]:
        """Tickets that a continued run must play again: handed out, but not taken or passed over."""
        chosen = [int(group.group_id[1:]) for group in self.hand]
        return sorted([*self.open, *self._again, *chosen])

    def issues(self) -> dict[int, int]:
        """The first attempts of tickets that were handed out before, for `play_again`."""
        return {number: attempt for number, attempt in self._first_attempts.items() if attempt}

    def play_again(self, tickets: Sequence[int], issues: Mapping[int, int] | None = None) -> None:
        """Hand these tickets out before new ones; ``issues`` has the first attempts of some."""
        self._again = sorted({*self._again, *tickets})
        self._first_attempts = Counter({**self._first_attempts, **(issues or {})})

    def _judge(self, number: int, state: GroupState) -> Group | None:
        """Take a finished group, or pass it over."""
        del self.open[number]
        group_id = state.ticket.group_id
        if state.status is GroupStatus.DROPPED:
            self._pass(group_id, "dropped")
            return None
        group = state.group()
        if self._too_old(group):
            self._play_later(number, state.next_attempt)
            self._passed.append(Passed(group_id, "stale"))
            return None
        if self._all_alike(group) and self._skipped_in_a_row < self.config.max_skipped:
            self._skipped_in_a_row += 1
            self._pass(group_id, "skipped")
            return None
        self._skipped_in_a_row = 0
        self.counts["taken"] += 1
        self._used_attempts[number] = state.next_attempt
        return group

    def _pass(self, group_id: str, why: str) -> None:
        self.counts[why] += 1
        self._passed.append(Passed(group_id, why))

    def _play_later(self, number: int, attempt: int) -> None:
        self._first_attempts[number] = attempt
        self._again = sorted([*self._again, number])
        self.counts["stale"] += 1

    def _too_old(self, group: Group) -> bool:
        return self.too_old(oldest_version(turn for one in group.episodes for turn in one.turns))

    def _all_alike(self, group: Group) -> bool:
        if not self.config.skip_equal_returns or len(group.episodes) < 2:
            return False
        if self.config.zero_variance is not None:
            return self.config.zero_variance(group)
        returns = [episode.total_reward for episode in group.episodes]
        return max(returns) - min(returns) <= self.config.equal_tolerance

    def _must_wait_for(self, number: int) -> bool:
        limit = self.config.max_overtakes
        return limit is not None and self._overtaken[number] >= limit

    def _count_overtaken(self, taken: int) -> None:
        self._farthest = max(self._farthest, taken)
        if self.config.max_overtakes is None:
            return
        still = [*self.open, *self._again]
        self._overtaken = Counter({number: self._overtaken[number] + (number < taken) for number in still})


def oldest_version(turns: Iterable[Turn]) -> int | None:
    """The oldest weights behind any token of these turns."""
    versions = (turn.policy_version for turn in turns)
    return min((version for version in versions if version is not None), default=None)
