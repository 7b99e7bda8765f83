"""Checks a device plan by simulating one rank of its learner (`rollgym plan --simulate`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.devices import memory
from rollgym.devices.memory import Sharding
from rollgym.devices.models import ModelShape
from rollgym.devices.report import PlanReport, size_text
from rollgym.devices.types import TrainMesh
from rollgym.devices.workload import Job
from rollgym.trainer.cluster.roles import STRATEGIES
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.learner.config import LearnerConfig, ParallelConfig
from rollgym.trainer.losses.settings import LossConfig

FEW = (3, 4)
"""Layers of the two simulations from which that of a deeper model is extrapolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak memory of one rank in one phase, in bytes."""

    phase: str
    planned: int
    simulated: int
    others: int = 0
    """Planned for other roles on the device meanwhile."""
    limit: int | None = None
    """Bytes of the device that a plan may use."""

    @property
    def error(self) -> float:
        """The plan's error relative to the simulation."""
        return self.planned / self.simulated - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """The peaks of a simulated rank beside those that were planned."""

    strategy: str
    mesh: TrainMesh
    layers: int
    """Layers that were simulated; fewer than the model's if the rest was extrapolated."""
    peaks: tuple[PhasePeak, ...]

    def table(self) -> str:
        """Return one line per phase."""
        ranks = f"{self.mesh.ranks} rank{'s' * (self.mesh.ranks > 1)}"
        how = f"{self.strategy} on {ranks}" + ("" if self.mesh.plain else f" ({self.mesh})")
        lines = [f"  {how}; bytes of the learner's tensors on each, from {self.layers} layers"]
        for peak in self.peaks:
            sizes = f"planned {size_text(peak.planned)}, simulated {size_text(peak.simulated)}"
            lines.append(f"  {peak.phase}: {sizes} ({100 * peak.error:+.0f} %)")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        phases = [
            {"phase": p.phase, "planned": p.planned, "simulated": p.simulated, "error": p.error}
            for p in self.peaks
        ]
        return {
            "strategy": self.strategy,
            "mesh": asdict(self.mesh),
            "layers": self.layers,
            "phases": phases,
        }

    def check(self) -> None:
        """Raise `UsageError` if the simulated rank does not fit."""
        for peak in self.peaks:
            if peak.limit is not None and peak.simulated + peak.others > peak.limit:
                raise UsageError(
                    f"The simulation refutes this plan: {peak.phase} needs "
                    f"{size_text(peak.simulated + peak.others)} on each device, {size_text(peak.simulated)} "
                    f"of them for the learner, but {size_text(peak.limit)} may be used. Lower "
                    "learner.max_tokens_per_microbatch or use more devices."
                )


def simulate_plan(report: PlanReport, config: TrainConfig, *, every_layer: bool = False) -> SimulatedPlan:
    """Run the learner of the plan's first training rank on fake tensors.

    Args:
        report: The plan.
        config: The config that was planned; its model may be replaced by the plan's.
        every_layer: Simulate all layers. Otherwise few are, and the peaks of a deeper model extrapolated: its
            layers are alike, so each one adds the same.

    Raises:
        UsageError: The plan has something that cannot be simulated, such as DeepSpeed or a separate critic.
    """
    placement = report.plan.placements["actor_train"]
    mesh = placement.mesh or TrainMesh(shard=len(placement.devices))
    strategy = "single" if mesh.ranks == 1 else STRATEGIES[placement.sharding]
    if placement.mesh is not None:
        strategy = "mesh"
    elif mesh.ranks > 1 and config.learner.strategy != "auto":
        strategy = config.learner.strategy
    if "critic" in report.plan.placements:
        raise UsageError("A plan with a separate critic cannot be simulated: set learner.critic=shared.")
    reference = report.plan.placements.get("reference")
    together = reference is not None and reference.devices == placement.devices
    found = simulate_rank(
        report.job,
        config.learner,
        strategy,
        mesh,
        reference=together,
        cpu_offload="step" in placement.offload,
        every_layer=every_layer,
    )
    device = placement.devices[0]
    learner = ("actor_train", "reference") if together else ("actor_train",)
    phases = {"first update": "update actor", "second update": "update actor"}
    peaks = []
    for phase, simulated in found.items():
        use = next(
            (m for m in report.memory if m.phase == phases.get(phase, phase) and device in m.devices), None
        )
        others = 0 if use is None else sum(size for role, _, size in use.parts if role not in learner)
        planned = planned_rank(report.job, strategy, mesh, reference=together)
        peaks.append(
            PhasePeak(
                phase=phase,
                planned=planned[phase],
                simulated=simulated,
                others=others,
                limit=None if use is None else use.limit,
            )
        )
    layers = report.job.actor.layers if every_layer else min(report.job.actor.layers, max(FEW))
    return SimulatedPlan(strategy=strategy, mesh=mesh, layers=layers, peaks=tuple(peaks))


def simulate_rank(
    job: Job,
    config: LearnerConfig,
    strategy: str,
    mesh: TrainMesh,
    *,
    reference: bool = False,
    cpu_offload: bool = False,
    every_layer: bool = False,
) -> dict[str, int]:
    """Return the peak bytes of a rank that trains the actor of a job, by phase.

    Args:
        job: The models and the micro-batch: ``workload.microbatch`` tokens, all in one row.
        config: The learner's; what the job says differently is replaced.
        strategy: The strategy of the ranks.
        mesh: The ranks.
        reference: Whether the rank holds the reference policy too.
        cpu_offload: Keep on the host whatever the strategy can keep there.
        every_layer: Simulate all layers instead of extrapolating from few.
    """
    from rollgym.trainer.learner.simulate import simulate

    work = job.workload
    tokens = work.microbatch(mesh.context)
    settings: Any = {
        "dtype": "float32" if job.precision == "float32" else "bfloat16",
        "strategy": "auto",
        "parallel": ParallelConfig(**asdict(mesh)) if strategy == "mesh" else ParallelConfig(),
        "gradient_checkpointing": work.checkpointing,
        "critic": "none",
        "critic_rate": None,
        "value_clip": None,
        "value_coef": 0.5,
        "max_tokens_per_microbatch": -(-tokens // mesh.context),
        "epochs": 1,
        "mini_batches": 1,
    }
    settings = replace(config, **settings)

    def peaks(shape: ModelShape) -> dict[str, int]:
        found = simulate(
            config_of(shape),
            settings,
            LossConfig("grpo", kl_coef=0.01 if reference else 0.0),
            strategy=strategy,
            world=mesh.ranks,
            tokens=tokens,
            replies=round(tokens * work.reply_share),
            cpu_offload=cpu_offload,
        )
        return dict(found.peaks)

    if every_layer or job.actor.layers <= max(FEW):
        return peaks(job.actor)
    low, high = (peaks(replace(job.actor, layers=count)) for count in FEW)
    more = (job.actor.layers - FEW[1]) / (FEW[1] - FEW[0])
    return {phase: round(high[phase] + more * (high[phase] - low[phase])) for phase in high}


def planned_rank(job: Job, strategy: str, mesh: TrainMesh, *, reference: bool = False) -> dict[str, int]:
    """Return the bytes that plans count on for a rank that trains the actor, by phase of a simulation."""
    shape, rank = job.actor, job.lora_rank
    sharding: Sharding = "weights" if strategy in ("fsdp2", "mesh") and mesh.ranks > 1 else "none"
    state = memory.training_state(shape, mesh, sharding, rank)
    held = memory.held_weights(shape, memory.WEIGHT, mesh, sharding)
    frozen = held if reference and rank is None else 0
    score = memory.score_memory(shape, job, memory.WEIGHT, mesh, sharding, rank, vocabulary=True)
    passing = sum(score.values()) + state["weights"] - held
    update = sum(memory.update_memory(shape, job, mesh, sharding, rank, vocabulary=True).values())
    # The first update has no moments before its optimizer step, and no gradients before its backward pass.
    missing = state["optimizer"] + (state["gradients"] if sharding == "weights" else 0)
    stepping = sum(state.values())
    # Adapters are made whole before they are sharded.
    adapters = 0 if rank is None or sharding == "none" else memory.WEIGHT * shape.lora_parameters(rank)
    phases = {"start": state["weights"] + frozen + adapters, "score actor": passing + frozen}
    if reference:
        phases["score reference"] = passing + frozen
    phases["first update"] = max(update - missing, stepping) + frozen
    phases["second update"] = update + frozen
    return phases


def config_of(shape: ModelShape) -> Any:
    """Return a transformers config with the sizes of a model.

    Raises:
        UsageError: No family has these sizes, such as dense layers between those with experts.
    """
    from transformers import AutoConfig

    if shape.experts and (shape.dense_layers or shape.shared_inner):
        raise UsageError(
            f"{shape.name} has dense layers or shared experts beside its experts, which is not simulated: "
            "choose a dense model or one with experts in every layer."
        )
    if shape.experts:
        family = "qwen3_moe" if shape.qk_norm else "mixtral"
    else:
        family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias and not shape.out_bias else "llama"
    more: dict[str, Any] = {} if family == "qwen2" else {"head_dim": shape.head_dim}
    more |= {"attention_bias": shape.out_bias} if family in ("llama", "qwen3", "qwen3_moe") else {}
    more |= {"mlp_bias": shape.mlp_bias} if family == "llama" else {}
    if family == "qwen3_moe":
        more |= {"num_experts": shape.experts, "moe_intermediate_size": shape.expert_inner}
    elif family == "mixtral":
        more |= {"num_local_experts": shape.experts}
    more |= {"num_experts_per_tok": shape.experts_used} if shape.experts else {}
    return AutoConfig.for_model(
        family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        **more,
    )
