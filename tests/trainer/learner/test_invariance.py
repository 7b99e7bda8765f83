"""Invariance of the gradient on a real model: to the partition of a batch, its order, rows, padding."""

from dataclasses import replace
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
    reordered,
    tiny,
)

from rollgym.trainer.data.batch import Batch, make_batch, micro_batches  # noqa: E402
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence  # noqa: E402
from rollgym.trainer.learner import forward as scoring  # noqa: E402
from rollgym.trainer.learner import learner as learner_module  # noqa: E402
from rollgym.trainer.learner import modules  # noqa: E402
from rollgym.trainer.learner.learner import Learner  # noqa: E402
from rollgym.trainer.learner.objective import batch_weights  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402

LOSSES = [
    LossConfig("ppo", dual_clip=1.5),
    LossConfig("grpo", kl_coef=0.3, entropy_coef=0.1),
    LossConfig("gspo", clip_low=0.2, clip_high=0.2),
    LossConfig("cispo"),
    LossConfig("topr"),
    LossConfig("reinforce", tis_cap=1.5),
    LossConfig("gspo", clip_low=0.2, clip_high=0.2, ratio_level="episode"),
    LossConfig("topr", ratio_level="episode"),
]
MODES = ["token-mean", "sequence-mean", "constant"]
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=[f"{one.name}-{one.ratio_level}" for one in LOSSES])
per_mode = pytest.mark.parametrize("mode", MODES)


def weighing(mode: str, loss: LossConfig | None = None) -> LossConfig:
    constant = 20.0 if mode == "constant" else None
    settings: dict[str, Any] = {"aggregation": mode, "aggregation_constant": constant}
    return replace(loss or LossConfig("grpo"), **settings)


@per_loss
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_any_cut_into_micro_batches_gives_the_same_gradient(loss: LossConfig, layout: str) -> None:
    """Rule 16: all rows at once, a few, or one by one; padded or packed."""
    batch = mixed_batch()
    assert len(micro_batches([len(row.inputs) for row in batch.sequences], 40, padded=layout == "padded")) > 2
    expected = gradient(batch, loss=loss, layout="padded", max_tokens_per_microbatch=10_000)
    for budget in (1, 40, 10_000):
        assert_same(gradient(batch, loss=loss, layout=layout, max_tokens_per_microbatch=budget), expected)


@per_mode
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_so_it_is_for_a_critic_and_for_every_weighting(mode: str, critic: str) -> None:
    """Rule 16."""
    batch = mixed_batch(also=("returns", "values"))
    found = [
        gradient(
            batch,
            loss=weighing(mode),
            critic=critic,
            value_clip=0.5,
            max_tokens_per_microbatch=n,
            layout=layout,
        )
        for n, layout in ((10_000, "padded"), (1, "packed"), (40, "packed"))
    ]
    assert any(name.startswith("critic.") for name in found[0])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@per_loss
def test_the_order_of_episodes_does_not_matter(loss: LossConfig) -> None:
    batch = mixed_batch()
    expected = gradient(batch, loss=loss)
    assert_same(gradient(reordered(batch, [3, 0, 4, 2, 1]), loss=loss), expected)
    assert differ(gradient(reordered(batch, [3, 0, 4, 2]), loss=loss), expected) > 1e-3


@per_mode
@pytest.mark.parametrize(
    "loss",
    [
        LossConfig("grpo"),
        LossConfig("cispo"),
        LossConfig("reinforce"),
        LossConfig("gspo", clip_low=0.2, clip_high=0.2, ratio_level="episode"),
        LossConfig("topr", ratio_level="episode"),
    ],
    ids=lambda loss: loss.name,
)
def test_an_episode_weighs_the_same_in_however_many_rows_it_is(mode: str, loss: LossConfig) -> None:
    """Rule 5: the same tokens in one row, or in one row for each turn that repeats what came before."""
    rng = np.random.default_rng(0)
    whole = [make_row(rng, spans) for spans in ([(5, 3), (4, 2), (3, 4)], [(6, 2)], [(3, 1), (2, 5)])]
    fanned = [[whole[0], whole[0], whole[0]], [whole[1]], [whole[2], whole[2]]]
    places = [[slice(0, 3), slice(3, 5), slice(5, 9)], [slice(0, 2)], [slice(0, 1), slice(1, 6)]]
    advantages = [rng.normal(size=len(row.action_positions)) for row in whole]
    one = make_batch([episode([row]) for row in whole], advantages=advantages)
    many = make_batch(
        [
            episode(
                [TokenSequence(row.ids, row.action_positions[at]) for row, at in zip(rows, cuts, strict=True)]
            )
            for rows, cuts in zip(fanned, places, strict=True)
        ],
        advantages=advantages,
    )
    old = one.arrays["behavior"] + 0.1
    found = gradient(many.with_arrays(old=old), loss=weighing(mode, loss))
    assert_same(found, gradient(one.with_arrays(old=old), loss=weighing(mode, loss)))


@per_mode
def test_episodes_without_tokens_are_in_no_denominator(mode: str) -> None:
    """Rules 18 and 19: padding that weighs nothing changes nothing; a copy that weighs something does."""
    batch = mixed_batch(count=3)
    nothing = TokenEpisode("n", (), np.zeros(0), np.zeros(0, dtype=np.int64))
    padded = Batch((nothing, *batch.episodes, nothing), batch.arrays)
    expected = gradient(batch, loss=weighing(mode))
    assert_same(gradient(padded, loss=weighing(mode)), expected, 0.0)
    assert differ(gradient(reordered(batch, [0, 1, 2, 2]), loss=weighing(mode)), expected) > 1e-3


@pytest.mark.parametrize("name", ["gspo", "topr"])
def test_a_ratio_over_the_episode_is_another_than_over_each_row(name: str) -> None:
    batch = mixed_batch()
    by_row, by_episode = (
        gradient(batch, loss=LossConfig(name, ratio_level=level)) for level in ("sequence", "episode")
    )
    assert differ(by_row, by_episode) > 1e-4


def blind() -> Any:
    """A model that sees one token only: what its attention finds is thrown away."""
    model = tiny()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


@per_loss
@per_mode
def test_what_the_environment_wrote_carries_no_loss(loss: LossConfig, mode: str) -> None:
    """Rules 3 and 19: to a model that looks back one token only, more observation makes no difference."""
    short = mixed_batch()
    rng = np.random.default_rng(9)
    longer = Batch(tuple(wordier(one, rng) for one in short.episodes), short.arrays)
    assert sum(len(row.ids) for row in longer.sequences) > 2 * sum(len(row.ids) for row in short.sequences)

    def found(batch: Batch) -> dict[str, Any]:
        made = gradient(batch, model=blind(), loss=weighing(mode, loss))
        return {name: value for name, value in made.items() if "self_attn" not in name}

    assert_same(found(longer), found(short))


def wordier(one: TokenEpisode, rng: np.random.Generator) -> TokenEpisode:
    """The episode with more for the model to read before each turn; the last token read stays."""
    rows = []
    for row in one.sequences:
        ids: list[int] = []
        places: list[int] = []
        for at, token in enumerate(row.ids):
            starts_turn = at + 1 in row.action_positions and at not in row.action_positions
            ids += rng.integers(0, VOCABULARY, 17).tolist() if starts_turn else []
            if at in row.action_positions:
                places.append(len(ids))
            ids.append(int(token))
        rows.append(TokenSequence(np.array(ids), np.array(places)))
    return TokenEpisode(one.name, tuple(rows), one.behavior, one.tokens_per_turn, one.final_ids)


def repeated() -> Batch:
    """Episodes of which several are read alike and end differently."""
    rng = np.random.default_rng(4)
    rows = [make_row(rng, [(4, 2), (3, 2)]), make_row(rng, [(9, 1)])]
    copies = [
        TokenSequence(np.append(row.ids[:-1], n), row.action_positions) for n in range(3) for row in rows
    ]
    episodes = [episode([row], f"e{n}") for n, row in enumerate(copies)]
    return make_batch(
        episodes,
        advantages=[rng.normal(size=one.num_tokens) for one in episodes],
        returns=[rng.normal(size=one.num_tokens) for one in episodes],
        values=[rng.normal(size=one.num_tokens) for one in episodes],
    )


@pytest.mark.parametrize("critic", ["none", "shared", "separate"])
def test_rows_read_alike_teach_the_same_computed_once_or_apart(
    critic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = repeated()
    once = gradient(batch, loss="reinforce", critic=critic)
    for module in (scoring, modules):
        monkeypatch.setattr(module, "distinct", lambda rows: (list(rows), np.arange(tokens(rows))))
    assert_same(gradient(batch, loss="reinforce", critic=critic), once)
    assert_same(gradient(batch, loss="reinforce", critic=critic, max_tokens_per_microbatch=1), once)


def tokens(rows: list[TokenSequence]) -> int:
    return sum(len(row.action_positions) for row in rows)


def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For each pass with a gradient, how long the rows are that it computes."""
    seen: list[list[int]] = []
    usual = modules.score

    def spy(model: Any, rows: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append([len(row.inputs) for row in scoring.distinct(rows)[0]])
        return usual(model, rows, **kwargs)

    monkeypatch.setattr(modules, "score", spy)
    return seen


def test_rows_read_alike_are_in_one_micro_batch_and_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = computed(monkeypatch)
    gradient(repeated(), loss="reinforce", max_tokens_per_microbatch=10)
    assert seen == [[10], [9]]
    seen.clear()
    gradient(repeated(), loss="reinforce", max_tokens_per_microbatch=19)
    assert seen == [[10, 9]]


def idle(batch: Batch) -> Batch:
    """Without anything to learn from the second episode and the last row."""
    advantages = batch.arrays["advantages"].copy()
    for row in {*batch.sequences_of([1]), len(batch.sequences) - 1}:
        advantages[batch.starts[row] : batch.starts[row + 1]] = 0
    return batch.with_arrays(advantages=advantages)


@per_mode
@pytest.mark.parametrize(
    "loss",
    [one for one in LOSSES if not one.kl_coef],
    ids=lambda one: f"{one.name}-{one.ratio_level}",
)
def test_rows_without_an_advantage_are_not_computed_and_still_count(
    loss: LossConfig, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = idle(mixed_batch())
    seen = computed(monkeypatch)
    left_out = gradient(batch, loss=weighing(mode, loss), max_tokens_per_microbatch=1)
    assert sum(map(len, seen)) == len(batch.sequences) - 3
    # One pass for each row, or for each of the three episodes that have an advantage.
    assert len(seen) == (3 if loss.ratio_level == "episode" else len(batch.sequences) - 3)
    monkeypatch.setattr(learner_module, "rows_with_gradient", lambda batch, rows, loss: rows)
    assert_same(left_out, gradient(batch, loss=weighing(mode, loss)))


@pytest.mark.parametrize("reason", ["entropy", "kl", "critic"])
def test_rows_without_an_advantage_are_computed_where_they_teach_something_else(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = idle(mixed_batch(also=("returns", "values") if reason == "critic" else ()))
    terms = {"entropy": {"entropy_coef": 0.1}, "kl": {"kl_coef": 0.1}, "critic": {}}[reason]
    seen = computed(monkeypatch)
    critic = "shared" if reason == "critic" else "none"
    found = gradient(batch, loss=LossConfig("grpo", **terms), critic=critic, max_tokens_per_microbatch=1)
    assert len(seen) == len(batch.sequences)
    assert differ(found, found | {name: 0 * value for name, value in found.items()}) > 1e-3


@per_mode
@pytest.mark.parametrize("critic", ["none", "shared"])
def test_masked_tokens_have_no_gradient_and_are_in_no_denominator(mode: str, critic: str) -> None:
    """Whatever the numbers of masked tokens are, the gradient is the same; and it is not zero."""
    also = ("returns", "values") if critic == "shared" else ()
    batch = mixed_batch(also=also)
    trained = (np.arange(batch.num_tokens) % 3 != 0).astype(np.float64)
    loss = weighing(mode, LossConfig("grpo", entropy_coef=0.1))
    kept = gradient(batch.with_arrays(trained=trained), loss=loss, critic=critic)
    other = {
        name: np.where(trained, array, array + 5.0)
        for name, array in batch.arrays.items()
        if name in ("advantages", "returns", "behavior")
    }
    assert_same(kept, gradient(batch.with_arrays(trained=trained, **other), loss=loss, critic=critic))
    assert differ(kept, gradient(batch, loss=loss, critic=critic)) > 1e-4
    weights = batch_weights(batch.with_arrays(trained=trained), range(len(batch.episodes)), loss)
    assert not weights[trained == 0].any()
    if mode != "constant":
        assert weights.sum() == pytest.approx(1.0)


def test_a_batch_without_any_advantage_changes_nothing() -> None:
    batch = mixed_batch().with_arrays(advantages=np.zeros(mixed_batch().num_tokens))
    learner = make_learner()
    before = {name: tensor.clone() for name, tensor in learner.model.named_parameters()}
    metrics = learner.update(batch)
    assert metrics["grad_norm"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.model.named_parameters())


def test_every_episode_is_in_one_mini_batch_of_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 18: 7 episodes in 3 parts, twice; dealt differently each time, none of them twice or never."""
    dealt: list[list[int]] = []
    usual = Learner._accumulate

    def spy(self: Learner, batch: Batch, episodes: list[int]) -> Any:
        dealt.append(list(episodes))
        return usual(self, batch, episodes)

    monkeypatch.setattr(Learner, "_accumulate", spy)
    learner = make_learner(epochs=2, mini_batches=3)
    for _ in range(2):
        learner.update(mixed_batch(count=7))
    epochs = [dealt[n : n + 3] for n in range(0, 12, 3)]
    for epoch in epochs:
        assert sorted(number for part in epoch for number in part) == list(range(7))
    assert len({str(epoch) for epoch in epochs}) == 4
    assert learner.steps == 12


@per_mode
def test_a_mini_batch_is_weighed_by_itself(mode: str) -> None:
    """The gradient of a part is that of a batch which holds nothing else."""
    batch = mixed_batch(count=4)
    learner = make_learner(learning_rate=0.0, clip_norm=None, loss=weighing(mode))
    learner._accumulate(batch, [1, 3])
    found = {f"model.{name}": p.grad.clone() for name, p in learner.model.named_parameters()}
    assert_same(found, gradient(reordered(batch, [1, 3]), loss=weighing(mode)))
