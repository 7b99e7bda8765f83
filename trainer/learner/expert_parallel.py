"""Expert parallelism: ranks that compute different rows and share the experts of every layer.

Each rank of an expert group holds as many experts as the others. In a layer, it sends every token to the
ranks that hold its experts (all-to-all), computes the tokens it gets with its own experts, and sends them
back. Everything else of the model is computed by each rank for its own rows. A rank without tokens for its
experts takes part with empty tensors, forwards and backwards: collectives must match.

An expert's gradient is then the sum over the tokens of the whole group, while other gradients are summed over
ranks afterwards: `split_experts` divides the former by the number of ranks, so that FSDP2's averages, and the
factor of `ParallelStrategy.backward`, hold for both.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollgym.core.errors import UsageError
from rollgym.trainer.learner.collectives import exchange, scale_gradient
from rollgym.trainer.learner.vocabulary_parallel import local_part


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Return the experts of each layer whose computation transformers lets others replace."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def split_experts(model: nn.Module, name: str, mesh: DeviceMesh) -> list[nn.Module]:
    """Distribute the experts of a model over the ranks of a mesh, in place; returns them by layer.

    Args:
        model: The module with the experts.
        name: The name of the model, for errors.
        mesh: The ranks that share the experts: one dimension.

    Raises:
        UsageError: The model has no experts, or they cannot be distributed over so many ranks.
    """
    layers = find_experts(model)
    if any(path.endswith("experts.base_layer") for path, _ in model.named_modules()):
        raise UsageError(
            f"{name} has LoRA matrices on its experts, which cannot be distributed: set "
            "learner.parallel.expert to 1, or learner.lora.targets to other layers."
        )
    if not layers:
        raise UsageError(f"{name} has no experts that can be distributed: set learner.parallel.expert to 1.")
    for experts in layers:
        _split_layer(experts, name, mesh)
    return layers


def _split_layer(experts: Any, name: str, mesh: DeviceMesh) -> None:
    ranks, count = mesh.size(), int(experts.num_experts)
    if count % ranks:
        raise UsageError(
            f"{name} has {count} experts, which learner.parallel.expert = {ranks} does not divide: choose a "
            f"divisor of {count}."
        )
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    names += [f"{matrix}_bias" for matrix in names] if experts.has_bias else []
    parameters = dict(experts.named_parameters())
    if parameters.keys() != set(names) or any(p.shape[0] != count for p in parameters.values()):
        raise UsageError(
            f"{name} has experts with other parameters ({', '.join(sorted(parameters))}) than "
            f"{', '.join(names)}, which cannot be distributed: set learner.parallel.expert to 1."
        )
    for attribute, whole in parameters.items():
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        if not whole.is_meta:  # a view would keep the whole in memory
            cast(Any, part)._local_tensor = part.to_local().clone()
        experts._parameters[attribute] = nn.Parameter(part, requires_grad=whole.requires_grad)
    experts.forward = _Experts(experts, names, mesh)


class _Experts:
    """The forward of one layer's experts."""

    def __init__(self, module: Any, names: list[str], mesh: DeviceMesh) -> None:
        self._module, self._names = module, names
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._experts = int(module.num_experts) // mesh.size()
        """Number of experts of each rank."""

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute experts with transformers' signature."""
        choices = top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        # Not `bincount`, whose result has a shape that depends on the numbers: fake tensors have none.
        sizes = chosen.new_zeros(self._experts * self._ranks)
        sizes.scatter_add_(0, chosen, torch.ones_like(chosen))
        received_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(received_sizes, sizes, group=self._group)
        by_source = received_sizes.view(self._ranks, self._experts)
        sent = row_counts(sizes.view(self._ranks, self._experts).sum(1), len(chosen))
        received = row_counts(by_source.sum(1), len(chosen))
        tokens = exchange(hidden_states[order // choices], sent, received, self._group)
        # They come rank by rank, each in the order of its experts, which compute those of all ranks at once.
        numbers = torch.arange(self._experts, device=sizes.device).repeat(self._ranks)
        owners = torch.repeat_interleave(numbers, received_sizes, output_size=len(tokens))
        together = torch.argsort(owners, stable=True)
        computed = self._compute(tokens[together], row_counts(by_source.sum(0), len(tokens)))
        back = exchange(computed[_inverse(together)], received, sent, self._group)
        weighted = back[_inverse(order)] * top_k_weights.reshape(-1, 1)
        return weighted.view(-1, choices, hidden_states.shape[-1]).sum(1).to(hidden_states.dtype)

    def _compute(self, tokens: Tensor, sizes: list[int]) -> Tensor:
        """Compute tokens that are sorted by expert; those without tokens get a gradient of 0."""
        module = self._module
        weights = {
            name: scale_gradient(local_part(getattr(module, name)), 1 / self._ranks) for name in self._names
        }
        parts = []
        for expert, states in enumerate(torch.split(tokens, sizes)):
            states = self._linear(states, weights, self._names[0], expert)
            states = module._apply_gate(states) if module.has_gate else module.act_fn(states)
            parts.append(self._linear(states, weights, "down_proj", expert))
        return torch.cat(parts)

    def _linear(self, states: Tensor, weights: dict[str, Tensor], name: str, expert: int) -> Tensor:
        weight = weights[name][expert]
        bias = weights[f"{name}_bias"][expert] if self._module.has_bias else None
        return nn.functional.linear(states, weight.T if self._module.is_transposed else weight, bias)


def row_counts(counts: Tensor, expected: int) -> list[int]:
    """Read numbers of rows, ``expected`` in all. A simulation, which has no numbers, shares them out."""
    numbers: list[int] = counts.tolist()
    return numbers


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes another."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
