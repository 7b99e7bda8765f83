"""The description of a run in its folder: config, manifest and plan."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rollgym.config.loader import Settings, dump, fingerprint
from rollgym.core.errors import UsageError, os_reason
from rollgym.core.files import replacing
from rollgym.core.types import SCHEMA_VERSION
from rollgym.io.run_dir import MANIFEST, write_json
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.weight_sync import plan_text
from rollgym.utils.command_line import command_line
from rollgym.utils.env_info import package_versions

if TYPE_CHECKING:
    from rollgym.trainer.runtime import RunPlan

CONFIG, PLAN = "config.yaml", "plan.json"


def create_folder(folder: Path, config: TrainConfig, settings: Settings, kind: str) -> None:
    """Claim a folder for a run and write its config and manifest."""
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder} already holds a run: add --resume to continue it, or change --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, settings)
    except OSError as error:
        raise UsageError(f"Cannot write the run to {folder}: {os_reason(error)}.") from None
    write_json(
        folder / MANIFEST,
        {
            "schema": SCHEMA_VERSION,
            "kind": kind,
            "name": config.name or folder.name,
            "command": command_line(),
            "envs": [{"id": env.id, "kwargs": env.kwargs} for env in config.envs],
            "seed": config.seed,
            "config_sha256": fingerprint(settings),
            "versions": versions(config),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def versions(config: TrainConfig) -> dict[str, str]:
    """Versions of packages and the CPU: if they are equal, equal seeds give bit-identical weights."""
    import torch  # here: reading a config must not load it

    return {
        **{name: value for env in config.envs for name, value in package_versions(env.id).items()},
        **{name: version(name) for name in ("torch", "transformers")},
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def write_config(folder: Path, settings: Settings) -> None:
    """Write every setting, defaults included."""
    with replacing(folder / CONFIG) as file:
        file.write(dump(settings).encode())


def plan_line(plan: RunPlan) -> str:
    """The plan in one line."""
    ranks, engines = plan["ranks"], plan["engines"]
    return (
        f"{plan['runtime']}, {plan['layout']}, strategy {plan['strategy']} on {ranks} "
        f"rank{'s' * (ranks != 1)}, {engines} {plan['engine']} engine{'s' * (engines != 1)}"
    )


def plan_lines(plan: RunPlan) -> list[str]:
    """The plan as lines for the console."""
    lines = [f"plan: {plan_line(plan)}", f"  devices       {plan['devices']}"]
    if dtypes := plan.get("dtypes"):  # on Ray, each node chooses its own
        lines.append(f"  compute       {', '.join(f'{role} {dtype}' for role, dtype in dtypes.items())}")
    if sync := plan.get("weight_sync"):
        lines.append(f"  weight sync   {plan_text(sync)}")
    for role, placement in plan["roles"].items():
        spread = f"{placement['tensor_parallel']} x {placement['data_parallel']} (tensor x data parallel)"
        offload = f", offloads {', '.join(placement['offload'])}" if placement["offload"] else ""
        lines.append(f"  {role:13} {placement['devices']}, {spread}{offload}")
    return [*lines, f"  environments  {plan['environments']}"]
