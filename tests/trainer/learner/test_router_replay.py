"""Router replay: the learner computes a mixture of experts with the experts that the engine chose."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from family_models import make_family  # noqa: E402
from learner_cases import (  # noqa: E402
    VOCABULARY,
    assert_same,
    gradient,
    make_learner,
    mixed_batch,
    tiny,
    with_experts,
)

from rollgym.core.errors import RunError, UsageError  # noqa: E402
from rollgym.core.routed_experts import missing_expert  # noqa: E402
from rollgym.core.serialization import decode_episode, encode_episode  # noqa: E402
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn  # noqa: E402
from rollgym.engines.base import GenerateRequest, Sampling, WeightSource  # noqa: E402
from rollgym.engines.embedded.engine import EmbeddedEngine  # noqa: E402
from rollgym.engines.embedded.routing import ExpertRecorder, find_routers  # noqa: E402
from rollgym.trainer.data.batch import Batch, make_batch  # noqa: E402
from rollgym.trainer.data.packing import pack  # noqa: E402
from rollgym.trainer.data.sequences import token_episode  # noqa: E402
from rollgym.trainer.learner.config import LoraSettings  # noqa: E402

SLOW = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("mixtral", "gpt_oss", "jetmoe", "longcat_flash")
]
"""Softmax after the choice, two routers in a layer, and 260 experts."""


async def play(engine: EmbeddedEngine, number: int, turns: int = 3) -> Episode:
    """A conversation; those of an even number and the next have the same prompts."""
    rng = np.random.default_rng(number // 2)
    ids: list[int] = []
    played = []
    for turn in range(turns):
        added = rng.integers(0, VOCABULARY - 4, 20 if turn == 0 else 3).tolist()
        ids += added
        made = await engine.generate(
            GenerateRequest(
                request_id=f"{number}/{turn}",
                prompt_ids=tuple(ids),
                sampling=Sampling(max_tokens=2 + (number + turn) % 4, seed=10 * number + turn),
                session=str(number),
            )
        )
        experts = made.experts_of_turn(len(ids), len(added))
        ids += made.token_ids
        played.append(
            Turn(
                observation="",
                action="",
                prompt_ids=tuple(added),
                action_ids=made.token_ids,
                logprobs=made.logprobs,
                version_spans=made.version_spans,
            )
        )
        if experts is not None:
            played[-1] = replace(played[-1], routed_experts=experts)
    return Episode(
        spec=EpisodeSpec(episode_id=f"e{number}", env_id="test/Env-v0"),
        outcome=Outcome.TURN_LIMIT,
        turns=tuple(played),
    )


async def rollout(engine: EmbeddedEngine, count: int = 6) -> list[Episode]:
    return list(await asyncio.gather(*(play(engine, number) for number in range(count))))


def sampled(model: Any, count: int = 6, **options: Any) -> list[Episode]:
    async def run() -> list[Episode]:
        engine = EmbeddedEngine(model, threads=1, **{"return_routed_experts": True, **options})
        try:
            return await rollout(engine, count)
        finally:
            await engine.close()

    return asyncio.run(run())


def batch_of(episodes: Sequence[Episode]) -> Batch:
    tokens = [token_episode(episode) for episode in episodes]
    rng = np.random.default_rng(0)
    return make_batch(tokens, advantages=[rng.normal(size=one.num_tokens) for one in tokens])


def with_choice(batch: Batch, experts: Sequence[Any]) -> Batch:
    """The batch with other experts, by sequence."""
    given = iter(experts)
    episodes = tuple(
        replace(one, sequences=tuple(replace(row, experts=next(given)) for row in one.sequences))
        for one in batch.episodes
    )
    return Batch(episodes, batch.arrays)


@torch.no_grad()
def own_choice(model: Any, ids: Sequence[int]) -> Any:
    """The experts that a plain forward chooses for every token."""
    plain = copy.deepcopy(model)
    recorder = ExpertRecorder(find_routers(plain))
    plain(input_ids=torch.tensor([list(ids)]), use_cache=False)
    chosen = recorder.take().numpy()
    return chosen.view(np.uint8 if chosen.itemsize == 1 else np.uint16)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama4_text", *SLOW])
def test_the_engine_reports_the_experts_of_a_plain_forward(family: str) -> None:
    model = make_family(family)
    for episode in sampled(model, count=4, deterministic=False):
        (row,) = token_episode(episode).sequences
        assert row.experts is not None
        assert len(row.experts) == len(row.ids) - 1
        assert np.array_equal(row.experts, own_choice(model, row.ids[:-1]))


def test_experts_stay_with_their_keys_and_values() -> None:
    """Through preemption, eviction and a prefix that another sequence computed."""
    model = with_experts("qwen3_moe")

    async def run() -> tuple[list[Episode], list[Episode], Any]:
        engine = EmbeddedEngine(
            model, threads=1, return_routed_experts=True, cache_tokens=96, context_length=64, prefill_chunk=8
        )
        first, second = await rollout(engine, 8), await rollout(engine, 4)
        stats = await engine.stats()
        await engine.close()
        return first, second, stats

    first, second, stats = asyncio.run(run())
    assert stats.evicted_tokens > 0
    assert stats.preempted > 0
    assert stats.prefix_hit_tokens > 0
    for episode in (*first, *second):
        (row,) = token_episode(episode).sequences
        assert np.array_equal(row.experts, own_choice(model, row.ids[:-1]))


def test_after_new_weights_the_experts_are_theirs() -> None:
    old, new = with_experts("qwen3_moe"), with_experts("qwen3_moe", seed=1)

    async def run() -> tuple[Episode, Episode]:
        engine = EmbeddedEngine(old, threads=1, return_routed_experts=True)
        before = await play(engine, 0)
        await engine.update_weights(1, WeightSource(tensors=dict(new.state_dict())))
        after = await play(engine, 0)
        await engine.close()
        return before, after

    before, after = asyncio.run(run())
    for model, episode in ((old, before), (new, after)):
        (row,) = token_episode(episode).sequences
        assert np.array_equal(row.experts, own_choice(model, row.ids[:-1]))
    assert not np.array_equal(own_choice(old, range(20)), own_choice(new, range(20)))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("family", ["deepseek_v3", *SLOW[:3]])
def test_replaying_the_own_choice_changes_nothing(family: str, layout: str) -> None:
    model = make_family(family)
    batch = batch_of(sampled(model, count=4, deterministic=False))
    expected = gradient(batch, model=model, layout=layout, router_replay="off")
    found = gradient(batch, model=model, layout=layout, router_replay="on")
    assert_same(found, expected, 2e-5)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_other_experts_get_the_weights_and_gradients_of_their_scores(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a router that takes the experts of each token from a table."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    model = with_experts("qwen3_moe")
    rng = np.random.default_rng(3)
    table = np.stack([rng.permutation(4)[:2] for _ in range(VOCABULARY * 2)]).reshape(VOCABULARY, 2, 2)
    plain = mixed_batch(seed=2)
    batch = with_choice(plain, [table[row.ids[:-1]].astype(np.uint8) for row in plain.sequences])
    found = gradient(batch, model=model, layout=layout)
    replayed = make_learner(model, layout=layout).logprobs(batch)
    assert np.abs(make_learner(model, layout=layout).logprobs(plain) - replayed).max() > 0.01

    now: dict[str, Any] = {}
    own_forward = qwen.Qwen3MoeTopKRouter.forward

    def forward(self: Any, hidden: Any) -> Any:
        if "ids" not in now:
            return own_forward(self, hidden)
        logits = torch.nn.functional.linear(hidden, self.weight)
        tokens = now["ids"]
        if len(tokens) != len(hidden):
            tokens = tokens[self.block.rollgym_wanted[0]]
        chosen = torch.from_numpy(table)[tokens, self.number]
        weights = torch.softmax(logits, -1).gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    def note(_: Any, args: Any, kwargs: Any) -> None:
        now["ids"] = kwargs["input_ids"].flatten()

    learner = make_learner(model, layout=layout, router_replay="off", learning_rate=0.0, clip_norm=None)
    for number, layer in enumerate(learner.model.model.layers):
        object.__setattr__(layer.mlp.gate, "block", layer.mlp)
        layer.mlp.gate.number = number
    learner.model.model.register_forward_pre_hook(note, with_kwargs=True)
    monkeypatch.setattr(qwen.Qwen3MoeTopKRouter, "forward", forward)
    assert np.abs(learner.logprobs(batch) - replayed).max() < 1e-5
    assert_same(found, gradient(batch, learner), 2e-5)


def test_with_gradient_checkpointing_and_lora_the_gradient_is_the_same() -> None:
    model = with_experts("mixtral")
    rng = np.random.default_rng(5)
    plain = mixed_batch(seed=2)
    batch = with_choice(plain, [choice(rng, len(row.ids) - 1) for row in plain.sequences])
    expected = gradient(batch, model=model)
    assert_same(gradient(batch, model=model, gradient_checkpointing=True), expected, 1e-6)

    learner = make_learner(model, lora=LoraSettings(rank=2))
    assert np.abs(learner.logprobs(batch) - make_learner(model).logprobs(batch)).max() < 1e-6
    own = make_learner(model, router_replay="off").logprobs(batch)
    assert np.abs(learner.reference(batch) - own).max() < 1e-6


def choice(rng: np.random.Generator, count: int) -> Any:
    return np.stack([rng.permutation(4)[:2] for _ in range(count * 2)]).reshape(count, 2, 2).astype(np.uint8)


def test_tokens_without_recorded_experts_are_routed_by_the_learner() -> None:
    model = with_experts("mixtral")
    rng = np.random.default_rng(5)
    plain = mixed_batch(seed=2)
    known = [choice(rng, len(row.ids) - 1) for row in plain.sequences]
    none = [np.full_like(experts, missing_expert(experts.dtype)) for experts in known]
    # The last action token is not read, and the one before only its state: of these rows, all after the first
    # action token lack experts, which changes nothing for that token alone.
    cut = []
    for row, experts in zip(plain.sequences, known, strict=True):
        first = row.action_positions[0]
        cut.append(
            np.concatenate([experts[:first], np.full_like(experts[first:], missing_expert(experts.dtype))])
        )
    learner = make_learner(model, layout="padded")
    own = make_learner(model, layout="padded", router_replay="off").logprobs(plain)
    whole = learner.logprobs(with_choice(plain, known))
    partly = learner.logprobs(with_choice(plain, cut))
    firsts, others = plain.starts[:-1], np.setdiff1d(np.arange(plain.num_tokens), plain.starts[:-1])
    assert np.abs(partly - whole)[firsts].max() < 1e-6 < 0.01 < np.abs(partly - whole)[others].max()
    assert np.abs(partly - own).max() > 0.01
    assert np.abs(learner.logprobs(with_choice(plain, none)) - own).max() < 1e-6
    assert np.abs(learner.logprobs(plain) - own).max() < 1e-6


def test_a_prefix_with_other_experts_is_not_shared() -> None:
    ids = [np.arange(40), np.arange(40)]
    one = np.zeros((40, 2, 2), dtype=np.uint8)
    other = one.copy()
    other[25, 1, 0] = 3
    assert len(pack(ids, [one, one]).ids) == 40
    assert len(pack(ids, [one, other]).ids) == 40 + 15
    assert len(pack(ids, [one, None]).ids) == 80
    assert len(pack(ids, [None, None]).ids) == 40


def test_the_gap_of_a_bfloat16_engine_is_smaller_with_replay() -> None:
    model = make_family("mixtral")
    batch = batch_of(sampled(model, count=16, dtype="bfloat16", deterministic=False))
    gaps = {}
    for replay in ("on", "off"):
        metrics = make_learner(model, router_replay=replay).update(batch)
        gaps[replay] = metrics["train_rollout_logprob_diff"]
        assert ("router_replay_frac" in metrics) == (replay == "on")
        if replay == "on":
            assert metrics["router_replay_frac"] == 1.0
            assert 0 < metrics["router_mismatch_frac"] < 0.1
    assert gaps["on"] < 0.6 * gaps["off"]


def test_copies_of_a_trained_model_route_by_themselves() -> None:
    learner = make_learner(with_experts("mixtral"))
    rng = np.random.default_rng(5)
    plain = mixed_batch(seed=2)
    ids = torch.from_numpy(plain.sequences[0].ids)[None]
    copied = copy.deepcopy(learner.model)
    with torch.no_grad():
        before = copied(input_ids=ids).logits
        learner.logprobs(with_choice(plain, [choice(rng, len(row.ids) - 1) for row in plain.sequences]))
        assert torch.equal(copied(input_ids=ids).logits, before)


def test_files_of_episodes_leave_the_experts_out_unless_they_are_asked_for() -> None:
    (episode,) = sampled(with_experts("mixtral"), count=1, deterministic=False)
    assert b"routed_experts" not in encode_episode(episode)
    whole = encode_episode(episode, routed_experts=True)
    assert decode_episode(whole).turns == episode.turns
    (row,) = token_episode(decode_episode(encode_episode(episode))).sequences
    assert row.experts is None


def test_a_model_without_experts_cannot_replay() -> None:
    with pytest.raises(UsageError, match="router_replay=on needs a mixture-of-experts model"):
        make_learner(tiny(), router_replay="on")
    assert make_learner(tiny()).modules.router_replay is None
    (episode,) = sampled(tiny(), count=1, deterministic=False)
    assert not episode.turns[0].routed_experts


def test_an_engine_that_reports_nothing_is_an_error_if_replay_is_on() -> None:
    with pytest.raises(UsageError, match="the engine reports no experts"):
        make_learner(with_experts("mixtral"), router_replay="on").update(mixed_batch())


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        ((2, 2), 4, "reports expert 4"),
        ((5, 2), 0, "experts of 5 layers"),
        ((2, 3), 0, "reports 3 experts for each token"),
    ],
)
def test_experts_of_another_model_are_an_error(shape: tuple[int, int], value: int, message: str) -> None:
    plain = mixed_batch()
    wrong = [np.full((len(row.ids) - 1, *shape), value, dtype=np.uint8) for row in plain.sequences]
    with pytest.raises((UsageError, RunError), match=message):
        make_learner(with_experts("mixtral")).logprobs(with_choice(plain, wrong))


def test_layers_without_a_router_may_be_reported() -> None:
    """SGLang reports every layer of the model."""
    model = make_family("deepseek_v3")
    plain = mixed_batch(seed=2)
    known = [own_choice(model, row.ids[:-1])[:, :, ::-1] for row in plain.sequences]
    padded = [np.concatenate([np.zeros_like(part[:, :1]), part], 1) for part in known]
    learner = make_learner(model)
    expected = learner.logprobs(with_choice(plain, known))
    assert np.array_equal(learner.logprobs(with_choice(plain, padded)), expected)
