"""Parallel strategies: which weights, gradients and optimizer states each rank holds.

    single   one process
    ddp      everything on every rank
    zero1    optimizer states sharded; zero2: gradients too; zero3: weights too (DeepSpeed)
    fsdp2    weights, gradients and optimizer states sharded
    mesh     the same over a mesh of dimensions (learner.parallel): copies, shards, tensor parallel ranks

A further strategy is a subclass of `ParallelStrategy` and one registration:

    register_strategy("mine", MyStrategy)

Imports no torch, so that configs can be checked against the registered names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from rollgym.core.errors import UnknownName, UsageError
from rollgym.trainer.learner.config import LearnerConfig, ParallelConfig

if TYPE_CHECKING:
    from rollgym.trainer.learner.strategies.base import ParallelStrategy

StrategyFactory = Callable[..., "ParallelStrategy"]
"""Takes the arguments of `ParallelStrategy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """A registered strategy."""

    name: str
    factory: str | StrategyFactory
    """Makes the strategy of one rank; ``module:attribute`` is imported when first used."""
    distributed: bool = True
    """True if its ranks form a process group; otherwise there is exactly one process."""
    cpu_offload: bool = True
    """True if it can keep weights or optimizer states on the CPU."""
    mesh: bool = False
    """True if ``learner.parallel`` arranges its ranks in a mesh."""

    def check(self, *, world: int, cpu_offload: bool, parallel: ParallelConfig | None = None) -> None:
        """Raise `UsageError` where the strategy does not support a number of ranks, CPU offload or a mesh."""
        parallel = parallel or ParallelConfig()
        if self.mesh:
            parallel.sizes(world)
        elif parallel != ParallelConfig():
            able = ", ".join(spec.name for spec in _STRATEGIES.values() if spec.mesh)
            raise UsageError(
                f"learner.parallel requires learner.strategy={able}: strategy={self.name} has no mesh."
            )
        if not self.distributed and world != 1:
            able = ", ".join(spec.name for spec in _STRATEGIES.values() if spec.distributed)
            raise UsageError(
                f"strategy={self.name} needs exactly 1 rank, got {world}. "
                f"For several ranks choose one of {able}."
            )
        if cpu_offload and not self.cpu_offload:
            able = ", ".join(spec.name for spec in _STRATEGIES.values() if spec.cpu_offload)
            raise UsageError(f"strategy={self.name} does not support CPU offload: choose one of {able}.")

    def make(self, *args: Any, **kwargs: Any) -> ParallelStrategy:
        """Make the strategy of this rank, from the arguments of `ParallelStrategy` after the name."""
        factory = self.factory
        if isinstance(factory, str):
            module, _, attribute = factory.partition(":")
            factory = cast(StrategyFactory, getattr(import_module(module), attribute))
        return factory(self.name, *args, **kwargs)


_STRATEGIES: dict[str, StrategySpec] = {}


def register_strategy(
    name: str,
    factory: str | StrategyFactory,
    *,
    distributed: bool = True,
    cpu_offload: bool = True,
    mesh: bool = False,
) -> None:
    """Make a strategy available under a name, for `Learner`, configs and checkpoints; see `StrategySpec`."""
    if name in _STRATEGIES:
        raise UsageError(f"Strategy {name!r} is already registered.")
    _STRATEGIES[name] = StrategySpec(
        name=name, factory=factory, distributed=distributed, cpu_offload=cpu_offload, mesh=mesh
    )


def find_strategy(name: str) -> StrategySpec:
    """Return a registered strategy, or raise `UnknownName` with the nearest names."""
    if name not in _STRATEGIES:
        raise UnknownName("strategy", name, _STRATEGIES, f"Choose one of {', '.join(_STRATEGIES)}.")
    return _STRATEGIES[name]


def check_parallel(config: LearnerConfig) -> None:
    """Raise `UsageError` where a config has dimensions of a mesh and a strategy without one."""
    if config.parallel != ParallelConfig() and not (
        config.strategy in _STRATEGIES and _STRATEGIES[config.strategy].mesh
    ):
        able = ", ".join(spec.name for spec in _STRATEGIES.values() if spec.mesh)
        raise UsageError(f"learner.parallel requires learner.strategy={able}.")


register_strategy("single", f"{__name__}.single:SingleStrategy", distributed=False, cpu_offload=False)
register_strategy("ddp", f"{__name__}.ddp:DdpStrategy", cpu_offload=False)
register_strategy("fsdp2", f"{__name__}.fsdp2:Fsdp2Strategy")
register_strategy("zero1", f"{__name__}.zero:Zero1Strategy")
register_strategy("zero2", f"{__name__}.zero:Zero2Strategy")
register_strategy("zero3", f"{__name__}.zero:Zero3Strategy")
register_strategy("mesh", f"{__name__}.mesh:MeshStrategy", mesh=True)
