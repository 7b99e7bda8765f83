"""Log-probs in chunks: the numbers and gradients of whole logits, which never exist."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import make_row, tiny  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import (  # noqa: E402
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from rollgym.trainer.learner import chunked_logprobs as chunked  # noqa: E402
from rollgym.trainer.learner.forward import allow_packing, has_plain_head, score  # noqa: E402

VOCABULARY, WIDTH = 50, 8
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def whole(hidden, weight, bias, rows, targets, temperature):
    """The same from all logits at once, by autograd."""
    logs = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return logs[rows, targets], -(logs.exp() * logs).sum(-1)


def inputs(with_bias: bool, dtype: Any = torch.float64) -> list[Any]:
    """Eleven states, of which some predict several tokens, one none, and not in order."""
    torch.manual_seed(0)
    hidden = torch.randn(11, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if with_bias else None
    rows = np.array([0, 1, 2, 5, 5, 4, 3, 5, 8, 9, 10, 7, 0])
    return [hidden, weight, bias, rows, torch.randint(0, VOCABULARY, (len(rows),))]


@pytest.mark.parametrize("limit", [1, 3 * VOCABULARY, 10**9], ids=["one by one", "threes", "all at once"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_values_and_gradients_are_those_of_whole_logits(monkeypatch, limit, temperature, with_bias):
    monkeypatch.setattr(chunked, "MAX_LOGITS", limit)
    results = []
    for compute in (chunked.chunked_logprobs, whole):
        arguments = inputs(with_bias)
        logprobs, entropy = compute(*arguments, temperature)
        factors = torch.linspace(-1, 2, len(logprobs), dtype=torch.float64)
        loss = (logprobs.double() * factors).sum() + (entropy.double() ** 2).sum()
        loss.backward()
        grads = [value.grad for value in arguments[:3] if value is not None]
        results.append([logprobs.double(), entropy.double(), *grads])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-5)


def test_frozen_weights_get_no_gradient():
    hidden, weight, _, rows, targets = inputs(False)
    logprobs, _ = chunked.chunked_logprobs(hidden, weight.detach(), None, rows, targets, 1.0)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_under_autocast_the_gradients_are_those_of_bfloat16_products():
    hidden, weight, _, rows, targets = inputs(False, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = chunked.chunked_logprobs(hidden, weight, None, rows, targets, 1.0)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.dtype == entropy.dtype == weight.grad.dtype == torch.float32
    rounded = [value.detach().bfloat16().float().requires_grad_() for value in (hidden, weight)]
    expected, entropies = whole(*rounded, None, rows, targets, 1.0)
    (expected.sum() + entropies.sum()).backward()
    torch.testing.assert_close(logprobs, expected, atol=0.05, rtol=0)
    torch.testing.assert_close(weight.grad, rounded[1].grad, atol=0.1, rtol=0.05)
    assert bool((logprobs <= 0).all())


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_scores_in_chunks_are_equal_and_smaller(monkeypatch, layout):
    rng = np.random.default_rng(0)
    rows = [make_row(rng, spans) for spans in ([(5, 30), (2, 20)], [(3, 40)], [(1, 9)])]
    rows.append(rows[1])  # computed once
    results, elements = [], []
    for limit in (10**9, 5000):
        monkeypatch.setattr(chunked, "MAX_LOGITS", limit)
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 500}))
        if layout == "packed":
            assert allow_packing(model) is None
        with Largest() as largest:
            stats = score(model, rows, layout=layout, temperature=1.3, chunk_logits=True)
            (stats.logprobs.sum() + 0.1 * stats.entropy.sum()).backward()
        results.append((stats, [parameter.grad for parameter in model.parameters()]))
        elements.append(largest.elements)
    (whole_stats, whole_grads), (stats, grads) = results
    torch.testing.assert_close(stats.logprobs, whole_stats.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(stats.entropy, whole_stats.entropy, atol=1e-5, rtol=0)
    assert torch.equal(stats.hidden, whole_stats.hidden)
    for ours, expected in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    num_logits = 99 * 500
    assert elements[0] >= num_logits
    assert elements[1] <= 500 * SIZES["hidden_size"]  # the gradient of the weights


def test_models_that_cap_or_scale_their_logits_are_not_chunked():
    assert has_plain_head(tiny())
    assert not has_plain_head(Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=30.0)))
    assert not has_plain_head(CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)))
