"""Training in bfloat16 on a CPU: block attention and lean modules have the gradients of plain ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import assert_same, gradient, make_learner, mixed_batch, tiny, weights  # noqa: E402

from rollgym.trainer.data.packing import pack  # noqa: E402
from rollgym.trainer.learner import block_attention, modules, packed_attention  # noqa: E402
from rollgym.trainer.learner.config import LoraSettings  # noqa: E402
from rollgym.trainer.learner.lean_modules import WeightCasts, make_lean  # noqa: E402
from rollgym.trainer.learner.strategies import base  # noqa: E402

CPU = torch.device("cpu")
TREES = {
    "apart": [(0, 30), (0, 5), (0, 1)],
    "siblings": [(40, 6), (40, 9), (40, 2), (40, 7)],
    "nested": [(20, 30), (35, 4), (35, 8), (20, 1)],
    "little in common": [(16, 30), (16, 25), (16, 40), (0, 9)],
}
"""For each row: tokens shared with the first, and further ones."""


def rows_of(tree: list[tuple[int, int]]) -> list[Any]:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 1000, 64)
    return [np.concatenate([first[:shared], rng.integers(0, 1000, own)]) for shared, own in tree]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("block", [1, 7, 128])
@pytest.mark.parametrize("last", [False, True])
def test_attention_by_blocks_is_that_of_each_row_alone(
    tree: list[tuple[int, int]], block: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "BLOCK", block)
    rows = rows_of(tree)
    packing = pack(rows)
    wanted = np.unique(np.concatenate([path[-2:] for path in packing.paths]))
    blocks = block_attention.plan_blocks(packing, CPU, wanted if last else None)
    assert max(one.num_queries for one in blocks) <= block

    generator = torch.Generator().manual_seed(0)

    def states(heads: int) -> Any:
        size = (heads, len(packing.ids), 8)
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()

    found = [states(heads) for heads in (6, 2, 2)]
    plain = [one.detach().clone().requires_grad_() for one in found]
    output = block_attention.attend_blocks(found[0], found[1], found[2], blocks, 0.3)
    expected = torch.zeros_like(output)
    for path in packing.paths:
        at = torch.from_numpy(path)
        q, k, v = (one[None, :, at] for one in plain)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3, enable_gqa=True
        )
        expected = expected.index_copy(0, at, attended[0].transpose(0, 1))
    used = torch.from_numpy(wanted) if last else torch.arange(len(output))
    assert torch.allclose(output[used], expected[used], atol=1e-6)
    if last:
        unused = np.setdiff1d(np.arange(len(output)), wanted)
        assert not output[torch.from_numpy(unused)].any()
    weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    for result in (output, expected):
        (result[used] * weight[used]).sum().backward()
    for one, other in zip(found, plain, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_scores_of_a_long_row_are_never_there_at_once() -> None:
    (row,) = rows_of([(0, 3000)])
    blocks = block_attention.plan_blocks(pack([row]), CPU)
    keys = [one.keys.stop - one.keys.start for one in blocks if isinstance(one.keys, slice)]
    assert len(keys) == len(blocks)
    pairs = [one.num_queries * count for one, count in zip(blocks, keys, strict=True)]
    assert max(pairs) <= block_attention.MAX_PAIRS
    assert sum(pairs) < 0.6 * 3000**2, "later keys are not skipped"
    assert max(one.bias.numel() for one in blocks if one.bias is not None) <= block_attention.BLOCK**2


LORA = LoraSettings(rank=4)


def learner_of(lora: bool, dtype: str = "bfloat16", **settings: Any) -> Any:
    settings = {"learning_rate": 0.0, "clip_norm": None, "layout": "packed", "dtype": dtype, **settings}
    learner = make_learner(lora=LORA if lora else None, **settings)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(parameter.numel())
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return learner


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Relative difference of whole gradients."""
    assert one.keys() == other.keys()
    a, b = (torch.cat([grads[name].flatten() for name in sorted(one)]).double() for grads in (one, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lean_gradients_are_as_near_to_float32_as_those_of_autocast(
    lora: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = mixed_batch()
    exact = gradient(batch, learner_of(lora, "float32"))
    monkeypatch.setattr(packed_attention, "is_fast_at_bfloat16", lambda: True)
    lean = learner_of(lora, gradient_checkpointing=checkpointing)
    assert lean.modules.weight_casts is not None
    found = gradient(batch, lean)
    monkeypatch.setattr(packed_attention, "is_fast_at_bfloat16", lambda: False)
    monkeypatch.setattr(modules, "make_lean", lambda model: None)
    monkeypatch.setattr(modules, "shrink_frozen", lambda model: None)
    usual = distance(gradient(batch, learner_of(lora)), exact)
    assert 0 < distance(found, exact) < max(2 * usual, 0.02)
    assert all(grad.dtype == torch.float32 for grad in found.values())


@pytest.mark.parametrize("lora", [False, True])
def test_lean_gradients_do_not_depend_on_the_cut(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "is_fast_at_bfloat16", lambda: True)
    batch = mixed_batch()
    whole = gradient(batch, learner_of(lora))
    assert distance(gradient(batch, learner_of(lora, max_tokens_per_microbatch=1)), whole) < 0.03


def test_weights_are_cast_once_for_all_micro_batches_and_again_after_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = learner_of(False, learning_rate=0.1, max_tokens_per_microbatch=1)
    before = learner.logprobs(mixed_batch())
    made: list[int] = []
    cast = WeightCasts.__call__

    def counting(self: Any, weight: Any) -> Any:
        known = dict(self._kept or {})
        result = cast(self, weight)
        made.extend([id(weight)] * (id(weight) not in known))
        return result

    monkeypatch.setattr(WeightCasts, "__call__", counting)
    learner.update(mixed_batch())
    accumulating = made[-len(set(made)) :]
    assert len(set(accumulating)) == len(accumulating), "a weight was cast in several micro-batches"
    assert not np.allclose(learner.logprobs(mixed_batch()), before), "casts of the old weights were used"


def test_frozen_weights_are_kept_in_bfloat16_only_where_nothing_is_lost() -> None:
    model = tiny()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.copy_(parameter.to(torch.bfloat16))
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    from rollgym.trainer.learner.config import LearnerConfig
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.losses.settings import LossConfig

    learner = Learner(model, LearnerConfig(lora=LORA, dtype="bfloat16", device="cpu"), LossConfig("grpo"))
    dtypes = {n: p.dtype for n, p in learner.model.named_parameters() if "base_layer" in n}
    assert {n for n, dtype in dtypes.items() if dtype == torch.bfloat16} == {
        n for n in dtypes if "q_proj" in n
    }
    merged = learner.weights().tensors
    assert merged is not None
    for name, tensor in merged.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name])


def test_a_norm_or_mlp_that_computes_something_else_is_left_alone() -> None:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=8,
    )
    make: Any = GemmaForCausalLM
    model = make(config)
    make_lean(model)
    layer = model.model.layers[0]
    assert "forward" not in vars(layer.input_layernorm)  # scales by 1 + weight
    assert "forward" not in vars(layer.mlp)  # GELU
    assert "forward" in vars(layer.mlp.up_proj)
    llama = tiny()
    make_lean(llama)
    layer = llama.model.layers[0]
    assert all("forward" in vars(module) for module in (layer.input_layernorm, layer.mlp))


def test_without_autocast_lean_modules_compute_as_before() -> None:
    plain, lean = tiny(), tiny()
    make_lean(lean)
    ids = torch.arange(20)[None]
    assert torch.equal(plain(input_ids=ids).logits, lean(input_ids=ids).logits)


def test_the_fused_optimizer_of_large_models_takes_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, loaded = make_learner(learning_rate=1e-2), make_learner(tiny(1), learning_rate=1e-2)
    monkeypatch.setattr(base, "SMALLEST", 0)
    large = make_learner(learning_rate=1e-2)
    assert large.strategy.param_groups[0]["fused"]
    assert not usual.strategy.param_groups[0]["fused"]
    for learner in (usual, large):
        learner.update(mixed_batch())
        learner.update(mixed_batch(seed=1))
    assert_same(weights(large), weights(usual), 1e-5)
    large.save(tmp_path)
    loaded.load(tmp_path)
    assert_same(weights(loaded), weights(large), 0.0)
    for learner in (loaded, large):
        learner.update(mixed_batch())
    assert_same(weights(loaded), weights(large), 1e-5)
