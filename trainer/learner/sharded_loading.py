"""Models that no rank holds whole: built without weights, sharded, then read shard by shard.

A model is made on the meta device, which stores nothing. A strategy shards it there. `load_shards` then reads
from the safetensors files the rows that this rank holds. What needs real numbers before that, such as the
check of the layout, uses the model's first layers alone (`read_first_layers`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from rollgym.core.errors import UsageError, one_line
from rollgym.core.trust import check_model_folder
from rollgym.engines.embedded.model import no_progress_bar, read_module
from rollgym.models.checkpoint_names import model_on_meta
from rollgym.trainer.learner.forward import has_plain_head
from rollgym.trainer.learner.layout import LayoutChoice, choose_layout

Owners = Mapping[str, tuple[nn.Module, str]]
"""The module and attribute of each parameter, by its name in the transformers model."""
Checked = tuple[LayoutChoice, bool]
"""The layout of rows, and whether logits may be computed in chunks."""
FEWEST = 2
"""Layers of `read_first_layers` at least: a first and a last one."""


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder; none if its weights are stored in another format."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def build_on_meta(folder: Path) -> Any | None:
    """Return a model folder's model without weights, in float32; None if it must be read as a whole."""
    if not folder.is_dir():
        raise UsageError(f"Cannot load a model from {folder}: the folder does not exist.")
    check_model_folder(folder)
    model = model_on_meta(folder) if weight_files(folder) else None
    if model is None:
        return None
    return copy.deepcopy(model).to(torch.float32).train(False)


def read_first_layers(folder: Path, device: torch.device) -> Any | None:
    """Return the first layers of a model with its embedding and output layer; None if it cannot be cut.

    Every type of layer is among them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not cut_layers(config):
        return None
    try:
        with no_progress_bar(), _quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, trust_remote_code=False, local_files_only=True
            )
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return None
    return model.to(device=device, dtype=torch.float32).train(False)


def cut_layers(config: Any) -> bool:
    """Shorten a config to its first layers, with each type among them; returns whether that is possible."""
    layers = getattr(config, "num_hidden_layers", None)
    types = getattr(config, "layer_types", None)
    if not isinstance(layers, int) or layers <= FEWEST:
        return False
    count = max([FEWEST, *(list(types or ()).index(kind) + 1 for kind in set(types or ()))])
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    return count < layers


def parameter_owners(model: nn.Module, prefix: str = "") -> Owners:
    """Return the owner of each parameter, for `load_shards`; tied parameters are listed under each name."""
    return {
        f"{prefix}{f'{path}.' if path else ''}{name}": (module, name)
        for path, module in model.named_modules()
        for name in module._parameters
        if module._parameters[name] is not None
    }


def load_model(model: nn.Module | Path, device: torch.device) -> Any:
    """Read or copy a model onto a device, in float32 and evaluation mode."""
    plain: Any = read_module(model, torch.float32) if isinstance(model, Path) else copy.deepcopy(model)
    # Weights are float32 whatever the compute dtype: a step is too small for bfloat16.
    return plain.to(device=device, dtype=torch.float32).train(False)


class ModelSource(Protocol):
    """Source of the weights of a model that is built without them."""

    def build(self) -> Any:
        """Return the model on the meta device, in float32."""

    def check(self, asked: Literal["auto", "padded", "packed"], device: torch.device) -> Checked:
        """Return the layout of rows, and whether logits may be computed in chunks."""

    def load(self, owners: Owners, model: nn.Module, device: torch.device) -> None:
        """Replace this rank's parameters and the buffers, which are on the meta device."""

    def load_whole(self, device: torch.device) -> Any:
        """Return the model with all weights on a device."""


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A model folder with safetensors files."""

    folder: Path

    def build(self) -> Any:
        """Return the model on the meta device, in float32."""
        return build_on_meta(self.folder)

    def check(self, asked: Literal["auto", "padded", "packed"], device: torch.device) -> Checked:
        """Check the first layers, or all of a model that cannot be cut."""
        probe = read_first_layers(self.folder, device)
        probe = self.load_whole(device) if probe is None else probe
        return choose_layout(probe, asked), has_plain_head(probe)

    def load(self, owners: Owners, model: nn.Module, device: torch.device) -> None:
        """Read this rank's shards."""
        load_shards(self.folder, owners, model, device)

    def load_whole(self, device: torch.device) -> Any:
        """Read the model."""
        return load_model(self.folder, device)


def source_of(folder: Path) -> FolderSource | None:
    """Return the source of a model folder; None if its model must be read as a whole."""
    return None if build_on_meta(folder) is None else FolderSource(folder)


@torch.no_grad()
def load_shards(folder: Path, owners: Owners, model: nn.Module, device: torch.device) -> None:
    """Read this rank's shards of parameters that are on the meta device, and make the buffers.

    Args:
        folder: The model folder.
        owners: The parameters, each a `DTensor` by now.
        model: What the parameters belong to; its buffers may still be on the meta device.
        device: Where shards are stored.
    """
    source = build_on_meta(folder)
    assert source is not None
    shards = {name: getattr(module, attribute) for name, (module, attribute) in owners.items()}
    if not any(parameter.is_meta for parameter in shards.values()):
        return
    mesh = next(iter(shards.values())).device_mesh
    for name, (module, attribute) in parameter_owners(source).items():
        shard = shards.get(name)
        if shard is None:  # not wanted: read no more of it than a shard, and drop it
            whole = getattr(module, attribute)
            shard = nn.Parameter(_on_meta(whole, mesh), requires_grad=False)
        module._parameters[attribute] = shard
    _read(folder, source, device)
    loaded = dict(source.named_parameters(remove_duplicate=False))
    done: dict[int, nn.Parameter] = {}
    for name, (module, attribute) in owners.items():
        old = shards[name]
        if id(old) not in done:
            done[id(old)] = nn.Parameter(_unmapped(loaded[name]), requires_grad=old.requires_grad)
        module._parameters[attribute] = done[id(old)]
    buffers = dict(source.named_buffers())
    _copy_buffers(model, buffers, device)


def _unmapped(shard: Any) -> DTensor:
    """Return a shard with its own memory: a view of a mapped file would change with the file."""
    result: DTensor = shard.data
    local = result._local_tensor
    if local.untyped_storage().nbytes() > local.nbytes:
        result._local_tensor = local.clone()
    return result


def _on_meta(whole: torch.Tensor, mesh: Any) -> DTensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = [Shard(0)] * mesh.ndim
    shape, _ = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = torch.empty(shape, dtype=whole.dtype, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _read(folder: Path, source: Any, device: torch.device) -> None:
    """Fill the sharded parameters and the buffers of a transformers model, by its loader."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(source)
    options = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        device_map={"": device},
        dtype=torch.float32,
        weight_mapping=mapping,
    )
    kind: Any = type(source)
    files = [str(file) for file in weight_files(folder)]
    try:
        with no_progress_bar():
            info, _ = kind._load_pretrained_model(source, None, files, options)
            missing = info.missing_keys - set(source.all_tied_weights_keys)
            missing -= {name for name, _ in source.named_buffers()}
            if missing or info.mismatched_keys:
                wrong = sorted(missing) or sorted(str(key[0]) for key in info.mismatched_keys)
                raise ValueError(f"{wrong[0]} is missing or has another shape")
            kind._finalize_model_loading(source, options, info)
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot load a model from {folder}: {one_line(error)}") from error


def _copy_buffers(owner: nn.Module, buffers: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Replace meta buffers of a module by those of the loaded model with the same path."""
    for path, module in owner.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or not buffer.is_meta:
                continue
            full = f"{path}.{name}".replace("base_model.model.", "").replace("base_layer.", "")
            found = [value for key, value in buffers.items() if key == full or key.endswith(f".{full}")]
            module._buffers[name] = found[0].to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report of the layers that are left out."""
    from transformers.utils import logging

    settings: Any = logging
    level = settings.get_verbosity()
    settings.set_verbosity_error()
    try:
        yield
    finally:
        settings.set_verbosity(level)
