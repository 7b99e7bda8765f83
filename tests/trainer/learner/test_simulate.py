"""One rank of the learner on fake tensors: its memory, and the mistakes that fail there."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from learner_cases import tiny  # noqa: E402

from rollgym.core.errors import RunError, UsageError  # noqa: E402
from rollgym.devices.models import PRESETS  # noqa: E402
from rollgym.devices.types import TrainMesh  # noqa: E402
from rollgym.devices.workload import Job, Workload  # noqa: E402
from rollgym.trainer.cluster.simulation import (  # noqa: E402
    PhasePeak,
    SimulatedPlan,
    config_of,
    planned_rank,
    simulate_rank,
)
from rollgym.trainer.learner import chunked_logprobs, objective  # noqa: E402
from rollgym.trainer.learner.config import LearnerConfig, LoraSettings, ParallelConfig  # noqa: E402
from rollgym.trainer.learner.learner import Learner  # noqa: E402
from rollgym.trainer.learner.memory_count import StorageCount  # noqa: E402
from rollgym.trainer.learner.simulate import Simulation, fake_batch, simulate  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160}
LOSS = LossConfig("reinforce", tis_cap=None)


def run(strategy: str = "fsdp2", world: int = 8, **changes: Any) -> Simulation:
    loss = changes.pop("loss", LOSS)
    config = LearnerConfig(**{"max_tokens_per_microbatch": 64, **changes})
    model = tiny(tie_word_embeddings=False, **SIZES).config
    return simulate(model, config, loss, strategy=strategy, world=world, tokens=64, replies=16)


def parameters() -> int:
    return sum(p.numel() for p in tiny(tie_word_embeddings=False, **SIZES).parameters())


def test_a_rank_holds_its_share_of_weights_and_moments() -> None:
    assert run().held == pytest.approx(12 * parameters() / 8, rel=0.02)
    assert run(strategy="single", world=1).held == pytest.approx(12 * parameters(), rel=0.02)


def test_a_reference_is_held_beside_the_policy() -> None:
    found = run(loss=LossConfig("grpo", kl_coef=0.1))
    assert found.held == pytest.approx(16 * parameters() / 8, rel=0.02)
    assert found.peaks["score reference"] > found.held


def test_checkpointing_and_lora_take_less() -> None:
    plain = run().peaks["second update"]
    assert run(gradient_checkpointing=True).peaks["second update"] < plain
    assert run(lora=LoraSettings(rank=2)).held < 0.6 * run().held


def test_the_peak_is_that_of_a_real_learner() -> None:
    """In float32 in one process: the real storages, counted in the same way."""
    config = LearnerConfig(max_tokens_per_microbatch=64, dtype="float32", device="cpu")
    batch = fake_batch(2, 64, 16, 50)
    with StorageCount() as count:
        # The given model, which is copied, is freed: it is not the learner's.
        learner = Learner(tiny(tie_word_embeddings=False, **SIZES), config, LOSS)
        learner.update(batch)
        count.phase("second update")
        learner.update(batch)
    found = run(strategy="single", world=1, dtype="float32")
    assert found.peaks["second update"] == pytest.approx(count.peaks["second update"], rel=0.02)


def test_a_tensor_on_another_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "_tensor", lambda values, device: torch.from_numpy(values).float())
    with pytest.raises(RunError, match="same device, but found at least two devices"):
        run()


def test_a_tensor_of_another_dtype_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_logprobs, "MAX_LOGITS", 10)
    plain = chunked_logprobs._logits
    monkeypatch.setattr(chunked_logprobs, "_logits", lambda hidden, *rest: plain(hidden.double(), *rest))
    with pytest.raises(RunError, match="same dtype"):
        run()


def test_a_tensor_parallel_rank_holds_its_part() -> None:
    parallel = ParallelConfig(shard=4, tensor=2)
    found = run(strategy="mesh", parallel=parallel)
    assert found.held == pytest.approx(12 * parameters() / 8, rel=0.05)


def test_a_rank_of_a_copy_holds_its_shard_of_the_copy() -> None:
    found = run(strategy="mesh", parallel=ParallelConfig(replicate=2, shard=4))
    assert found.held == pytest.approx(12 * parameters() / 4, rel=0.05)


def test_what_cannot_be_simulated_is_refused_in_one_sentence() -> None:
    with pytest.raises(UsageError, match="strategy=zero2 cannot be simulated: choose one of single, ddp, f"):
        run(strategy="zero2")
    with pytest.raises(UsageError, match="has dense layers or shared experts beside its experts"):
        config_of(replace(PRESETS["30b-moe"], dense_layers=1))


def test_a_refuted_plan_is_one_sentence_with_numbers() -> None:
    gib = 2**30
    peak = PhasePeak(phase="second update", planned=gib, simulated=3 * gib, others=gib, limit=2 * gib)
    plan = SimulatedPlan(strategy="fsdp2", mesh=TrainMesh(shard=8), layers=4, peaks=(peak,))
    with pytest.raises(UsageError, match=r"refutes this plan: second update needs 4\.0 GiB on each device"):
        plan.check()


@pytest.mark.parametrize("name", ["0.5b", "7b", "8b", "8x7b", "30b-moe"])
def test_presets_are_built_with_their_sizes(name: str) -> None:
    few = replace(PRESETS[name], layers=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(few))
    assert sum(p.numel() for p in model.parameters()) == few.parameters


@pytest.mark.parametrize(
    ("name", "mesh", "checkpointing", "lora"),
    [
        pytest.param("7b", TrainMesh(shard=8), False, None, marks=pytest.mark.slow),
        ("7b", TrainMesh(shard=8), True, None),
        ("7b", TrainMesh(shard=4, tensor=2), True, None),
        ("8b", TrainMesh(shard=4, context=2), True, None),
        ("30b-moe", TrainMesh(shard=4, expert=8), True, None),
        ("30b-moe", TrainMesh(shard=256), True, None),
        pytest.param("30b-moe", TrainMesh(shard=64), False, 16, marks=pytest.mark.slow),
    ],
)
def test_plans_count_what_a_simulated_rank_holds(
    name: str, mesh: TrainMesh, checkpointing: bool, lora: int | None
) -> None:
    """Models of real width; three layers are enough. 128 experts on 256 ranks are padded."""
    shape = replace(PRESETS[name], layers=3)
    work = Workload(prompt_tokens=3000, reply_tokens=1096, context=4096, checkpointing=checkpointing)
    work = replace(work, max_tokens_per_microbatch=4096)
    job = Job(actor=shape, lora_rank=lora, workload=work)
    strategy = "fsdp2" if mesh.plain else "mesh"
    config = LearnerConfig(lora=None if lora is None else LoraSettings(rank=lora))
    found = simulate_rank(job, config, strategy, mesh)
    planned = planned_rank(job, strategy, mesh)
    assert planned["second update"] == pytest.approx(found["second update"], rel=0.1)
    assert planned["score actor"] == pytest.approx(found["score actor"], rel=0.1)


def test_deep_models_are_extrapolated_from_few_layers() -> None:
    job = Job(
        actor=replace(PRESETS["0.5b"], layers=6),
        workload=Workload(prompt_tokens=48, reply_tokens=16, context=64, max_tokens_per_microbatch=64),
    )
    config, mesh = LearnerConfig(), TrainMesh(shard=8)
    whole = simulate_rank(job, config, "fsdp2", mesh, every_layer=True)
    few = simulate_rank(job, config, "fsdp2", mesh)
    assert few == pytest.approx(whole, rel=1e-3)
