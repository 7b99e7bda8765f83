"""Tensor parallelism: ranks that share the heads, the width of the MLP and the vocabulary of a model.

The plan is the model's own, as transformers lists it (``_tp_plan``): which projections are split by outputs
(``colwise``) and which by inputs (``rowwise``). Split parameters are `DTensor`, so that FSDP2 can shard them
further, checkpoints know their place, and each rank reads its part alone. Modules compute with the local
part; hidden states are whole on every rank of the group, heads and logits are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rollgym.core.errors import UsageError
from rollgym.trainer.learner.collectives import gather_last, split_last, sum_gradients, sum_states
from rollgym.trainer.learner.forward import parts
from rollgym.trainer.learner.vocabulary_parallel import VocabularyPart, local_part, mark

COLUMNS, ROWS, SHARED, LOOKUP = "columns", "rows", "shared", "lookup"
STYLES: Mapping[str, tuple[str, bool]] = {
    # style of transformers: how the weight is split; whether the module's split side is whole outside of it
    "colwise": (COLUMNS, False),
    "colwise_gather_output": (COLUMNS, True),
    "colwise_rep": (COLUMNS, True),
    "rowwise": (ROWS, False),
    "rowwise_split_input": (ROWS, True),
    "rowwise_rep": (ROWS, True),
    "replicated_with_grad_allreduce": (SHARED, False),
    "embedding_rowwise": (LOOKUP, False),
}


def split_model(model: Any, mesh: DeviceMesh) -> None:
    """Split a causal language model, adapted or not, over the ranks of a mesh, in place.

    Raises:
        UsageError: The model has no plan, or cannot be split over so many ranks.
    """
    body, head = parts(model)
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    _Splitter(name, model, body, mesh).split(head)


def split_body(body: Any, mesh: DeviceMesh) -> None:
    """Split a transformer without an output layer."""
    _Splitter(type(body).__name__, body, body, mesh).split(None)


class _Splitter:
    def __init__(self, name: str, model: Any, body: Any, mesh: DeviceMesh) -> None:
        self._name, self._body, self._mesh = name, body, mesh
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._rank = mesh.get_local_rank()
        self._owners: dict[int, list[tuple[Any, str]]] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                self._owners.setdefault(id(parameter), []).append((module, key))

    def split(self, head: Any) -> None:
        plan = self._check_plan()
        self._check_heads(plan)
        embedding = self._body.get_input_embeddings()
        for path, module in list(self._body.named_modules()):
            style = plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path))
            if module is embedding:
                self._lookup(module)
            elif style is not None and STYLES[style][0] != LOOKUP:
                self._module(path, module, *STYLES[style])
        if head is not None:
            base = head.base_layer if hasattr(head, "base_layer") else head
            self._module("the output layer", head, COLUMNS, False)
            size = base.weight.shape[0] // self._ranks
            mark(head, VocabularyPart(self._group, self._rank * size))

    def _check_plan(self) -> dict[str, str]:
        """Return the plan of the transformer, by paths with ``*`` for numbers."""
        plan = dict(getattr(self._body, "_tp_plan", None) or {})
        rest = {path: style for path, style in plan.items() if style != "embedding_rowwise"}
        if not rest:
            raise UsageError(
                f"{self._name} has no tensor parallel plan in transformers: set learner.parallel.tensor to 1."
            )
        paths = {re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path, _ in self._body.named_modules()}
        matrices = {re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path, _ in self._body.named_parameters()}
        strange = sorted(
            f"{path} ({style})"
            for path, style in rest.items()
            if (path in paths and style not in STYLES) or path in matrices
        )
        if strange:
            raise UsageError(
                f"{self._name} cannot be split by its tensor parallel plan: {strange[0]} is not supported. "
                "Set learner.parallel.tensor to 1."
            )
        return {path: style for path, style in plan.items() if path in paths}

    def _check_heads(self, plan: Mapping[str, str]) -> None:
        if not any(path.endswith("k_proj") and style == "colwise" for path, style in plan.items()):
            return
        config = self._body.config
        config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        for setting in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, setting, None)
            for count in heads if isinstance(heads, list | tuple) else [heads]:
                if isinstance(count, int) and count % self._ranks:
                    raise UsageError(
                        f"{self._name} has {count} heads ({setting}), which learner.parallel.tensor = "
                        f"{self._ranks} does not divide: choose a divisor of {count}."
                    )

    def _module(self, path: str, module: Any, how: str, outside: bool) -> None:
        """Split a module, or an adapted one: its matrices of low rank are split as its weight is."""
        if not hasattr(module, "base_layer"):
            self._plain(path, module, how, outside)
            return
        self._plain(path, module.get_base_layer(), how, outside)
        if outside or how == SHARED:
            return  # states outside of the module are whole, and so are the small matrices
        split = module.lora_B if how == COLUMNS else module.lora_A
        for inner in split.values():
            self._plain(path, inner, how, False)

    def _plain(self, path: str, module: Any, how: str, outside: bool) -> None:
        local: dict[str, Callable[[Tensor], Tensor]] = {}
        if how == SHARED:
            local = {name: self._sum_gradients for name, _ in module.named_parameters(recurse=False)}
        elif not isinstance(module, nn.Linear):
            kind = type(module).__name__
            raise UsageError(
                f"{self._name} cannot be split by its tensor parallel plan: {path} is a {kind}, not a linear "
                "layer. Set learner.parallel.tensor to 1."
            )
        else:
            dimension = 0 if how == COLUMNS else 1
            self._place(path, module, "weight", dimension)
            local["weight"] = local_part
            if module.bias is not None and how == COLUMNS:
                self._place(path, module, "bias", 0)
                local["bias"] = local_part
        compute = module.forward
        group, ranks, rank = self._group, self._ranks, self._rank

        def columns(states: Tensor) -> Tensor:
            with _local_parameters(module, local):
                outputs: Tensor = compute(sum_gradients(states, group))
            return gather_last(outputs, group, ranks, rank) if outside else outputs

        def rows(states: Tensor) -> Tensor:
            states = split_last(states, group, ranks, rank) if outside else states
            bias = module._parameters.get("bias")
            with _local_parameters(module, local):
                outputs: Tensor = nn.functional.linear(states, module.weight)
            outputs = sum_states(outputs, group)
            return outputs if bias is None else outputs + bias

        def shared(*args: Any, **kwargs: Any) -> Any:
            with _local_parameters(module, local):
                return compute(*args, **kwargs)

        module.forward = {COLUMNS: columns, ROWS: rows, SHARED: shared}[how]

    def _lookup(self, module: Any) -> None:
        """Split an embedding by tokens: each rank looks up those that it has."""
        self._place("the embedding", module, "weight", 0)
        size = module.weight.shape[0] // self._ranks
        start = self._rank * size
        if module.padding_idx is not None:
            inside = 0 <= module.padding_idx - start < size
            module.padding_idx = module.padding_idx - start if inside else None
        compute, group = module.forward, self._group

        def look_up(ids: Tensor) -> Tensor:
            other = (ids < start) | (ids >= start + size)
            with _local_parameters(module, {"weight": local_part}):
                states: Tensor = compute((ids - start).masked_fill(other, 0))
            return sum_states(states.masked_fill(other[..., None], 0.0), group)

        module.forward = look_up

    def _place(self, path: str, module: Any, name: str, dimension: int) -> None:
        """Replace a parameter by this rank's part of it; a tied one stays tied."""
        whole = module._parameters[name]
        if isinstance(whole, DTensor):
            return
        if whole.shape[dimension] % self._ranks:
            raise UsageError(
                f"{self._name} cannot be split: the size {whole.shape[dimension]} of {path} is not "
                f"divisible by learner.parallel.tensor = {self._ranks}."
            )
        part = distribute_tensor(whole.detach(), self._mesh, [Shard(dimension)], src_data_rank=None)
        if not whole.is_meta:  # a view would keep the whole in memory
            cast(Any, part)._local_tensor = part.to_local().clone()
        split = nn.Parameter(part, requires_grad=whole.requires_grad)
        for owner, key in self._owners[id(whole)]:
            owner._parameters[key] = split

    def _sum_gradients(self, tensor: Tensor) -> Tensor:
        return sum_gradients(tensor, self._group)


@contextmanager
def _local_parameters(module: Any, local: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Let a module compute with what the functions return of its parameters."""
    kept = {name: module._parameters[name] for name in local}
    module._parameters.update({name: local[name](tensor) for name, tensor in kept.items()})
    try:
        yield
    finally:
        module._parameters.update(kept)
