"""The critic: values, gradients, separation from the policy, and truncated episodes."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import (  # noqa: E402
    VOCABULARY,
    assert_same,
    differ,
    episode,
    gradient,
    make_learner,
    make_row,
    mixed_batch,
    shaken,
    weights,
)
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from rollgym.core.types import Episode, EpisodeSpec, Group, Outcome, Turn  # noqa: E402
from rollgym.trainer.advantages import AdvantageConfig  # noqa: E402
from rollgym.trainer.config import EnvConfig, TrainConfig  # noqa: E402
from rollgym.trainer.data.batch import Batch, make_batch  # noqa: E402
from rollgym.trainer.learner.learner import Learner  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402
from rollgym.trainer.rollout_batch import make_rollout_batch  # noqa: E402

CRITICS = pytest.mark.parametrize("critic", ["shared", "separate"])
LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])


def judged(seed: int = 0) -> Batch:
    """A batch with returns, and values of 0."""
    batch = mixed_batch(seed, also=("returns",))
    return batch.with_arrays(values=np.zeros(batch.num_tokens), advantages=np.zeros(batch.num_tokens))


def talkative(learner: Learner, seed: int = 0) -> Learner:
    """A critic that says something: a new one says 0."""
    noise = torch.Generator().manual_seed(seed)
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.head.weight.copy_(torch.randn(1, 32, generator=noise))
        learner.critic.head.bias.fill_(0.25)
    return learner


@CRITICS
def test_a_new_critic_is_zero(critic: str) -> None:
    values, last = make_learner(critic=critic).values(mixed_batch())
    assert not values.any()
    assert last == [0.0] * 5


@CRITICS
@LAYOUTS
def test_values_come_from_the_state_before_each_action_token(critic: str, layout: str) -> None:
    learner, batch = (
        talkative(make_learner(critic=critic, layout=layout, max_tokens_per_microbatch=40)),
        mixed_batch(),
    )
    head = learner.critic.head  # type: ignore[union-attr]
    expected = []
    with torch.no_grad():
        for row in batch.sequences:
            hidden = learner.model.model(input_ids=torch.from_numpy(row.ids)[None]).last_hidden_state[0]
            expected += head(hidden)[torch.from_numpy(row.action_positions - 1), 0].tolist()
    assert learner.values(batch)[0] == pytest.approx(expected, abs=1e-5)


@CRITICS
@LAYOUTS
def test_the_state_after_the_last_turn_is_valued_where_the_episode_was_cut_short(
    critic: str, layout: str
) -> None:
    """Rule 9: a value for each final state, by number and not by place; 0 where the task ended."""
    rng = np.random.default_rng(2)
    finals = [rng.integers(0, VOCABULARY, n) for n in (12, 3, 30)]
    rows = [make_row(rng, [(4, 2)]) for _ in range(5)]
    ends = [None, finals[0], finals[1], None, finals[2]]
    batch = make_batch([episode([row], final_ids=end) for row, end in zip(rows, ends, strict=True)])
    learner = talkative(make_learner(critic=critic, layout=layout, max_tokens_per_microbatch=16))
    head = learner.critic.head  # type: ignore[union-attr]
    with torch.no_grad():
        states = [learner.model.model(input_ids=torch.from_numpy(end)[None])[0][0, -1] for end in finals]
        told = [float(head(state)) for state in states]
    assert learner.values(batch)[1] == pytest.approx([0.0, told[0], told[1], 0.0, told[2]], abs=1e-5)


def test_a_final_state_beyond_the_context_is_read_as_far_as_it_goes() -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY}
    model = shaken(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)))
    learner = talkative(make_learner(model, critic="shared"))
    rng = np.random.default_rng(0)
    row, final = make_row(rng, [(4, 2)]), rng.integers(0, VOCABULARY, 20)
    long, fits = (make_batch([episode([row], final_ids=end)]) for end in (final, final[:16]))
    assert learner.values(long)[1] == learner.values(fits)[1] != [0.0]


@CRITICS
def test_values_move_towards_the_returns(critic: str) -> None:
    learner, batch = make_learner(critic=critic, epochs=4), judged()
    returns = batch.arrays["returns"]

    def error() -> float:
        return float(np.square(learner.values(batch)[0] - returns).mean())

    before = error()
    first = learner.update(batch)
    later = learner.update(batch)
    assert error() < 0.5 * before
    assert later["value_loss"] < first["value_loss"]


def test_a_critic_of_its_own_leaves_the_policy_alone() -> None:
    """With the same advantages the policy learns the same, bit for bit, whatever the critic's gradient is."""
    batch = mixed_batch()
    extra = mixed_batch(also=("returns", "values"))
    large = extra.with_arrays(returns=1e3 * extra.arrays["returns"])
    plain, critical = make_learner(), make_learner(critic="separate")
    plain.update(batch)
    critical.update(large)
    assert_same(weights(critical), weights(plain), 0.0)
    still = make_learner(critic="separate")
    still.update(judged())
    assert_same(weights(still), weights(make_learner()), 0.0)


def test_a_head_teaches_the_policys_states_too() -> None:
    learner = talkative(make_learner(critic="shared"))
    learner.update(judged())
    assert differ(weights(learner), weights(make_learner())) > 1e-3


def test_the_value_coefficient_scales_the_critics_gradient() -> None:
    whole, half = (gradient(judged(), critic="separate", value_coef=coef) for coef in (1.0, 0.5))
    of_critic = {name: value for name, value in whole.items() if name.startswith("critic.head")}
    assert_same({name: 2 * half[name] for name in of_critic}, of_critic)


def test_the_critic_has_a_separate_rate() -> None:
    slow = make_learner(critic="separate", critic_rate=0.0)
    slow.update(judged())
    assert not slow.values(mixed_batch())[0].any()
    fast = make_learner(critic="separate", learning_rate=0.0, critic_rate=0.01)
    fast.update(judged())
    assert fast.values(mixed_batch())[0].any()


def cut_or_ended(outcome: Outcome, **more: Any) -> Group:
    ends = {"terminated": outcome is Outcome.TERMINATED, "truncated": outcome is Outcome.TRUNCATED}
    turns = (
        Turn(observation="a", action="x", prompt_ids=(1, 2), action_ids=(3, 4), logprobs=(-1.0, -1.0)),
        Turn(
            observation="b",
            action="y",
            prompt_ids=(5,),
            action_ids=(6,),
            logprobs=(-1.0,),
            reward=1.0,
            **ends,
        ),
    )
    spec = EpisodeSpec(episode_id="e", env_id="rollgym/FrozenLake-v0", group_id="g")
    one = Episode(spec=spec, outcome=outcome, turns=turns, **more)
    return Group(group_id="g", size=1, episodes=(one,))


@CRITICS
@pytest.mark.parametrize("outcome", [Outcome.TRUNCATED, Outcome.TURN_LIMIT, Outcome.TERMINATED])
@pytest.mark.parametrize("again", [False, True])
def test_only_an_episode_that_was_cut_short_counts_what_might_have_followed(
    critic: str, outcome: Outcome, again: bool
) -> None:
    """Rule 9, all the way: flags, final ids, the critic's value of them, GAE."""
    learner = talkative(make_learner(critic=critic))
    config = TrainConfig(
        envs=[EnvConfig(id="rollgym/FrozenLake-v0")],
        estimator="gae",
        advantage=AdvantageConfig(gamma=0.9, lam=1.0),
        loss=LossConfig("ppo"),
        learner=learner.config,
    )
    group = cut_or_ended(outcome, final_ids=(7, 8, 9), final_row=again)
    made = make_rollout_batch([group], config, learner, 0.0)
    batch = made.batch
    assert made.metrics["truncated_frac"] == outcome.cut_short
    final = [7, 8, 9] if again else [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with torch.no_grad():
        state = learner.model.model(input_ids=torch.tensor([final]))[0][0, -1]
        follows = float(learner.critic.head(state))  # type: ignore[union-attr]
    assert abs(follows) > 0.05
    known = follows if outcome.cut_short else 0.0
    last = 1 + 0.9 * known
    assert batch.arrays["returns"] == pytest.approx([0.9 * last, 0.9 * last, last], abs=1e-5)
    values = learner.values(batch)[0]
    assert batch.arrays["values"].tolist() == values.tolist()
    assert batch.arrays["advantages"][2] == pytest.approx(last - values[2], abs=1e-5)


@CRITICS
def test_values_are_computed_in_float32_where_the_rest_is_bfloat16(critic: str) -> None:
    """A value near 1 in bfloat16 is off by up to 1/256, which returns and advantages would inherit."""
    learner, batch = talkative(make_learner(critic=critic, dtype="bfloat16")), mixed_batch()
    kept: list[Any] = []
    learner.critic.head.register_forward_hook(lambda module, given, found: kept.append((given[0], found)))  # type: ignore[union-attr]
    values = learner.values(batch)[0]
    states, found = kept[0]
    head = learner.critic.head  # type: ignore[union-attr]
    assert found.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(found, states.float() @ head.weight.float().T + head.bias)
    rounded = torch.tensor(values).bfloat16().double().numpy()
    assert not np.array_equal(values, rounded)


def test_the_value_clip_reaches_the_critics_loss() -> None:
    """Values that moved farther than the clip from what they were have no gradient towards the returns."""
    learner = talkative(make_learner(critic="separate", learning_rate=0.0, clip_norm=None, value_clip=0.01))
    batch = mixed_batch()
    values = learner.values(batch)[0]
    moved = batch.with_arrays(values=values - 1, returns=values + 1, advantages=np.zeros(batch.num_tokens))
    free = gradient(moved, talkative(make_learner(critic="separate", learning_rate=0.0, clip_norm=None)))
    held = gradient(moved, learner)
    name = "critic.head.weight"
    assert float(free[name].abs().max()) > 1e-2
    assert not held[name].any()
