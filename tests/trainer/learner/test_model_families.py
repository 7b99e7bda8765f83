"""Every family of models is computed as its own forward computes it, in learner and engine, or is refused."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from family_models import CONTEXT, FAMILIES, LEFT_OUT, SWITCH, VOCABULARY, make_family, small_config  # noqa: E402
from family_table import PAGE, learner_gap, plain, read_table, verdict  # noqa: E402
from learner_cases import episode, make_learner  # noqa: E402
from torch_models import make_engine  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from rollgym.core.errors import RunError, UsageError  # noqa: E402
from rollgym.engines.embedded import precision  # noqa: E402
from rollgym.engines.embedded.engine import EmbeddedEngine  # noqa: E402
from rollgym.engines.embedded.features import position_limit  # noqa: E402
from rollgym.testing import ScriptedEngine  # noqa: E402
from rollgym.trainer import runtime as setup  # noqa: E402
from rollgym.trainer.config import TrainConfig  # noqa: E402
from rollgym.trainer.data.batch import make_batch  # noqa: E402
from rollgym.trainer.data.sequences import TokenSequence  # noqa: E402
from rollgym.trainer.learner import layout  # noqa: E402
from rollgym.trainer.learner import packed_attention as attention  # noqa: E402
from rollgym.trainer.learner.layout import choose_layout  # noqa: E402

CORE = (
    "bamba", "doge", "falcon_h1", "falcon_mamba", "gemma2", "gemma3_text", "gpt_oss", "granitemoehybrid",
    "jamba", "lfm2", "llama", "llama4_text", "mamba", "mamba2", "minimax", "mistral", "nemotron",
    "nemotron_h", "phi3", "qwen2", "qwen3", "qwen3_next", "smollm3", "stablelm", "zamba2",
)  # fmt: skip
"""Families that were wrong once, and those that are used most."""
ROWS = read_table(PAGE.read_text())
MADE_WITH = f"transformers {transformers.__version__}," in PAGE.read_text()


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("kind", CORE)
def test_a_family_does_what_the_table_says(kind: str) -> None:
    assert verdict(kind).line(kind) == ROWS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - set(CORE)))
def test_every_other_family_does_what_the_table_says(kind: str) -> None:
    assert verdict(kind).line(kind) == ROWS[kind]


@pytest.mark.skipif(not MADE_WITH, reason="the table was made with another version of transformers")
def test_the_table_has_every_family_of_causal_language_models() -> None:
    assert set(ROWS) | set(LEFT_OUT) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not set(ROWS) & set(LEFT_OUT)
    assert len(ROWS) >= 100


def test_a_feature_that_is_not_computed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows without the window, the cap and the sinks that a model asks for are not used."""
    monkeypatch.setattr(attention, "attention_features", lambda *_: attention.Features())
    for kind in ("mistral", "gemma2", "gpt_oss"):
        choice = choose_layout(make_family(kind), "auto")
        assert choice.layout == "padded"
        assert "packed" not in str(choice)
        assert "log-probs differ from a plain forward" in str(choice)


def test_a_model_that_is_wrong_in_every_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = layout._plain
    monkeypatch.setattr(layout, "_plain", lambda model, rows: [logs - 0.1 for logs in honest(model, rows)])
    for asked, message in (
        ("auto", "LlamaForCausalLM cannot be trained: of padded rows, log-probs differ"),
        ("padded", "LlamaForCausalLM cannot be trained: of padded rows, log-probs differ"),
        ("packed", "cannot be trained on packed rows: log-probs differ .* Set learner.layout=padded"),
    ):
        with pytest.raises(UsageError, match=message):
            choose_layout(make_family("llama"), asked)  # type: ignore[arg-type]


def ids(count: int, seed: int = 0) -> Any:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=noise).numpy()


def test_rows_end_where_positions_change_their_meaning() -> None:
    """Beyond it, one long row would change the positions of every row beside it."""
    learner = make_learner(make_family("phi3"))
    fits, long = (TokenSequence(ids(SWITCH + more), ids(1) * 0 + 9) for more in (1, 2))
    short = TokenSequence(ids(9, seed=1), ids(1) * 0 + 8)
    long = TokenSequence(long.ids, ids(1) * 0 + SWITCH + 1)
    fits = TokenSequence(fits.ids, ids(1) * 0 + SWITCH)
    found = learner.logprobs(make_batch([episode([fits]), episode([short])]))
    model = make_family("phi3")
    expected = [float(plain(model, row.inputs.tolist())[-1, row.ids[-1]]) for row in (fits, short)]
    assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UsageError, match=f"has {SWITCH + 1} tokens.*keep episodes within {SWITCH} tokens"):
        learner.logprobs(make_batch([episode([long]), episode([short])]))
    changed = plain(model, ids(SWITCH + 1).tolist())[5] - plain(model, ids(9).tolist())[5]
    assert changed.abs().max() > 0.05, "the model does change there"
    engine = make_engine(make_family("phi3"), deterministic=False)
    assert engine.context_length == SWITCH
    with pytest.raises(
        UsageError, match=f"context_length={SWITCH + 1} exceeds the model.s context of {SWITCH} tokens"
    ):
        make_engine(make_family("phi3"), context_length=SWITCH + 1)


def test_servers_must_end_where_positions_change_their_meaning(tmp_path: Path) -> None:
    small_config("phi3").save_pretrained(tmp_path)
    setup.check_context(tmp_path, ScriptedEngine([], context_length=SWITCH))
    with pytest.raises(UsageError, match=f"change beyond {SWITCH} tokens.*--context-length {SWITCH}"):
        setup.check_context(tmp_path, ScriptedEngine([], context_length=SWITCH + 1))


def test_positions_that_depend_on_the_longest_row_have_a_limit() -> None:
    assert position_limit(small_config("llama")) is None
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    assert position_limit(small_config("llama", rope_parameters=dynamic)) == CONTEXT
    fixed = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    assert position_limit(small_config("llama", rope_parameters=fixed)) is None


def test_a_family_that_is_padded_learns_from_every_row_as_if_it_were_alone() -> None:
    """Mamba: the gradient of a batch is the mean of its rows' gradients."""
    model = make_family("mamba")
    model.rollgym_usual = model.config._attn_implementation
    assert learner_gap(model, "padded") < 1e-5
    rows = [TokenSequence(ids(9 + 7 * n, seed=n), ids(1) * 0 + 8 + 7 * n) for n in range(3)]
    advantages = [torch.ones(1).double().numpy() * (n + 1) for n in range(3)]
    settings: Any = {"learning_rate": 0.0, "clip_norm": None}

    def gradient(chosen: list[int]) -> dict[str, Any]:
        learner = make_learner(model, **settings)
        batch = make_batch(
            [episode([rows[n]], str(n), behavior=[-4.0]) for n in chosen],
            advantages=[advantages[n] for n in chosen],
        )
        learner.update(batch)
        return {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}

    together, apart = gradient([0, 1, 2]), [gradient([n]) for n in range(3)]
    for name, whole in together.items():
        assert torch.allclose(3 * whole, sum(one[name] for one in apart), atol=1e-5), name


def test_an_absurd_gap_stops_before_anything_is_learnt() -> None:
    learner = make_learner(options={"gap_limit": 0.2})
    row = TokenSequence(ids(12) % 50, ids(1) * 0 + 11)
    batch = make_batch([episode([row], behavior=[0.0])], advantages=[torch.ones(1).double().numpy()])
    own = learner.logprobs(batch)
    before = {name: tensor.clone() for name, tensor in learner.model.named_parameters()}
    for old in ({}, {"old": own}):
        wrong = batch.with_arrays(behavior=own + 0.3, **old)
        with pytest.raises(RunError, match=r"LlamaForCausalLM differ from the learner's by 0\.3 nats"):
            learner.update(wrong)
        assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.named_parameters())
        learner.update(wrong.with_arrays(staleness=own * 0 + 1))  # of older weights: they may differ
        for name, tensor in learner.model.named_parameters():
            tensor.data.copy_(before[name])
    learner.update(batch.with_arrays(behavior=own + 0.1))


def test_a_run_whose_engine_computes_another_model_stops_with_a_sentence(
    train_here: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gets other weights than the learner, and says that they are the same version."""

    def wrong(model: Any, **options: Any) -> EmbeddedEngine:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_output_embeddings().weight.mul_(4.0)
        return EmbeddedEngine(other, **options)

    monkeypatch.setattr(setup, "EmbeddedEngine", wrong)
    with pytest.raises(RunError) as stopped:
        train_here("run")
    assert re.match(
        r"The engine's log-probs of LlamaForCausalLM differ from the learner's by [\d.]+ nats on average for "
        r"tokens that the current weights sampled \(at most 0\.2 can be rounding\)",
        str(stopped.value),
    )


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 0.2),
        ({"learner": {"dtype": "bfloat16"}}, 0.5),
        ({"engine": {"dtype": "bfloat16"}}, 0.5),
        ({"engine": {"kind": "sglang"}}, 0.5),
        ({"engine": {"kind": "vllm"}}, 0.5),
        ({"model": {"path": "smollm2"}, "runtime": "ray"}, 0.5),
    ],
)
def test_the_gap_that_stops_a_run_allows_for_precision(changes: dict[str, Any], limit: float) -> None:
    config = TrainConfig.model_validate({"envs": [{"id": "rollgym/Bandit-v0"}], **changes})
    assert setup.gap_limit(config) == limit


@pytest.mark.parametrize(("speedup", "limit"), [(1.2, 0.2), (1.4, 0.5)])
def test_that_gap_is_larger_where_the_machine_is_fast_at_bfloat16(
    speedup: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "bfloat16_speedup", lambda threads: speedup)
    values = {"envs": [{"id": "rollgym/Bandit-v0"}], "model": {"path": "smollm2"}}
    assert setup.gap_limit(TrainConfig.model_validate(values)) == limit
    exact = values | {"engine": {"dtype": "float32"}, "learner": {"dtype": "float32"}}
    assert setup.gap_limit(TrainConfig.model_validate(exact)) == 0.2


def test_a_run_says_how_rows_are_laid_out_and_keeps_it(
    train_here: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads((train_here("run") / "manifest.json").read_text())["learner_layout"]
    assert kept["layout"] == "packed"
    assert kept["reason"] is None
    assert 0 <= kept["gap"] < 1e-4
    assert kept["longest"] > 20
    assert capsys.readouterr().err.count("rows are packed (") == 1
