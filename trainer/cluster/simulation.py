"""Checks a device plan by simulating one rank of its learner (`rollgym plan --simulate`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.devices.models import ModelShape
from rollgym.devices.report import PlanReport, size_text
from rollgym.devices.types import Role
from rollgym.trainer.cluster.roles import STRATEGIES
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.losses.settings import LossConfig

LEARNER: tuple[Role, ...] = ("actor_train", "reference")
"""Roles that a simulated rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak memory of one rank in one phase, in bytes."""

    phase: str
    planned: int
    simulated: int
    others: int
    """Planned for other roles on the device."""
    limit: int
    """Bytes of the device that a plan may use."""

    @property
    def error(self) -> float:
        """The plan's error relative to the simulation."""
        return self.planned / self.simulated - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """The peaks of a simulated rank beside those that were planned."""

    strategy: str
    world: int
    peaks: tuple[PhasePeak, ...]
    start: int
    """Peak while the rank starts."""

    def table(self) -> str:
        """Return one line per phase."""
        lines = [f"  {self.strategy} on {self.world} ranks, bytes of the learner's tensors on each"]
        for peak in self.peaks:
            sizes = f"planned {size_text(peak.planned)}, simulated {size_text(peak.simulated)}"
            lines.append(f"  {peak.phase}: {sizes} ({100 * peak.error:+.0f} %)")
        return "\n".join([*lines, f"  start: simulated {size_text(self.start)}"])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        phases = [
            {"phase": p.phase, "planned": p.planned, "simulated": p.simulated, "error": p.error}
            for p in self.peaks
        ]
        return {"strategy": self.strategy, "world": self.world, "start": self.start, "phases": phases}

    def check(self) -> None:
        """Raise `UsageError` if the simulated rank does not fit."""
        for peak in self.peaks:
            if peak.simulated + peak.others > peak.limit:
                raise UsageError(
                    f"The simulation refutes this plan: {peak.phase} needs "
                    f"{size_text(peak.simulated + peak.others)} on each device, {size_text(peak.simulated)} "
                    f"of them for the learner, but {size_text(peak.limit)} may be used. Lower "
                    "learner.max_tokens_per_microbatch or use more devices."
                )


def simulate_plan(report: PlanReport, config: TrainConfig) -> SimulatedPlan:
    """Run the learner of the plan's first training rank on fake tensors.

    Args:
        report: The plan.
        config: The config that was planned; its model may be replaced by the plan's.

    Raises:
        UsageError: The plan has something that cannot be simulated: DeepSpeed, a separate critic, experts.
    """
    from rollgym.trainer.learner.simulate import simulate

    placement = report.plan.placements["actor_train"]
    world = len(placement.devices)
    strategy = STRATEGIES[placement.sharding] if world > 1 else "single"
    if world > 1 and config.learner.strategy != "auto":
        strategy = config.learner.strategy
    if "critic" in report.plan.placements:
        raise UsageError("A plan with a separate critic cannot be simulated: set learner.critic=shared.")
    reference = report.plan.placements.get("reference")
    together = reference is not None and reference.devices == placement.devices
    work = report.job.workload
    dtype: Any = "float32" if report.job.precision == "float32" else "bfloat16"
    found = simulate(
        config_of(report.job.actor),
        replace(
            config.learner,
            dtype=dtype,
            strategy="auto",
            critic="none",
            critic_rate=None,
            value_clip=None,
            value_coef=0.5,
            max_tokens_per_microbatch=work.longest,
            epochs=1,
            mini_batches=1,
        ),
        LossConfig("grpo", kl_coef=0.01 if together else 0.0),
        strategy=strategy,
        world=world,
        tokens=work.longest,
        replies=round(work.longest * work.reply_share),
    )
    device = placement.devices[0]
    peaks = []
    for memory in report.memory:
        if device not in memory.devices or memory.phase not in found.peaks:
            continue
        planned = sum(size for role, _, size in memory.parts if role in LEARNER)
        peaks.append(
            PhasePeak(
                phase=memory.phase,
                planned=planned,
                simulated=found.peaks[memory.phase],
                others=memory.used - planned,
                limit=memory.limit,
            )
        )
    return SimulatedPlan(strategy=strategy, world=world, peaks=tuple(peaks), start=found.peaks["start"])


def config_of(shape: ModelShape) -> Any:
    """Return a transformers config with the sizes of a dense model."""
    from transformers import AutoConfig

    if shape.experts:
        raise UsageError(f"{shape.name} has experts, which cannot be simulated: choose a dense model.")
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias and not shape.out_bias else "llama"
    more: dict[str, Any] = {} if family == "qwen2" else {"attention_bias": shape.out_bias}
    more |= {"mlp_bias": shape.mlp_bias} if family == "llama" else {}
    more |= {} if family == "qwen2" else {"head_dim": shape.head_dim}
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
