"""A device without memory or arithmetic: code runs on it with fake tensors, as it would on a GPU.

No build of torch has this device, so a tensor that is left on the CPU meets an operation on another device,
and an operation between two dtypes fails. Autocast casts the same operations as on CUDA. What a kernel
computes, how fast it is, and what it needs beyond its results is not known here; of attention, the memory is
that of a fused kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME = "simulated"
_IN_LOW_PRECISION = (
    "addmm addmv addr addbmm baddbmm bmm einsum linear matmul mm mv prelu scaled_dot_product_attention"
)
_IN_FLOAT32 = (
    "exp expm1 log log1p reciprocal rsqrt pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm "
    "rms_norm logsumexp nll_loss l1_loss smooth_l1_loss mse_loss kl_div dist"
)
_TO_FLOAT32 = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList linalg_vector_norm"
)
"""Operations that set the dtype of their result, unless it is given."""
_libraries: list[Any] = []


def simulated_device() -> torch.device:
    """Register the device with torch, once in a process, and return it."""
    if not _libraries:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(NAME, _device_module())
        _register_autocast()
    return torch.device(NAME, 0)


@contextmanager
def fake_process_group(world: int) -> Iterator[None]:
    """Join a process group as rank 0 of any number of ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(f"cpu:fake,{NAME}:fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(*more: tuple[Any, str, Any]) -> Iterator[None]:
    """Compute with fake tensors, whose numbers are 1 wherever they are read.

    ``more``: further attributes to replace meanwhile: an owner, a name and a value.
    """
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    def outside(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return plain(*args, **kwargs)

        return call

    def ones(tensor: Any, *_: Any, **__: Any) -> Any:
        return np.ones(tensor.shape)

    patches: list[tuple[Any, str, Any]] = [
        (FakeTensor, "item", lambda tensor: 1.0),
        (FakeTensor, "__bool__", lambda tensor: True),
        (FakeTensor, "__float__", lambda tensor: 1.0),
        (FakeTensor, "__int__", lambda tensor: 1),
        (FakeTensor, "numpy", ones),
        (FakeTensor, "tolist", lambda tensor: ones(tensor).tolist()),
        (F, "scaled_dot_product_attention", _attention),
        (torch, "histc", _histc),
        (nn.Module, "_apply", _apply),
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", -1),  # single numbers would be computed for real
        *more,
    ]
    # The ranks of a mesh are real numbers.
    patches += [(DeviceMesh, name, outside(vars(DeviceMesh)[name])) for name in _MESH_METHODS]
    patches += [(module, "init_device_mesh", outside(module.init_device_mesh)) for module in _mesh_makers()]
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        # In this thread: autograd's threads are those of the devices that were there at its first use.
        with (
            torch.autograd.set_multithreading_enabled(False),
            FakeTensorMode(allow_non_fake_inputs=True),
            _SameDtypes(),  # type: ignore[no-untyped-call]
        ):
            yield
    finally:
        for owner, name, value in kept:
            delattr(owner, name) if value is None else setattr(owner, name, value)


class _SameDtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses products of two dtypes, as a GPU does; fake tensors would be multiplied."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _PRODUCTS and DTensor not in types:
            dtypes = {one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point()}
            if len(dtypes) > 1:
                found = " and ".join(sorted(map(str, dtypes)))
                raise RuntimeError(f"{func.overloadpacket} needs tensors of the same dtype, got {found}")
        return func(*args, **(kwargs or {}))


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "_grouped_mm")
)
_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten")


def _mesh_makers() -> list[Any]:
    """Return the modules of this package and of torch that make meshes."""
    from torch.distributed import device_mesh

    own = [module for name, module in sys.modules.items() if name.startswith("rollgym.trainer.learner.")]
    return [module for module in [device_mesh, *own] if hasattr(module, "init_device_mesh")]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the memory of a fused kernel."""
    if torch.is_autocast_enabled(NAME):
        query, key, value = (states.to(torch.get_autocast_dtype(NAME)) for states in (query, key, value))
    apply: Any = _FusedAttention.apply
    result: Tensor = apply(query, key, value)
    return result


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not query.dtype == key.dtype == value.dtype:
            raise RuntimeError(f"attention of {query.dtype} with {key.dtype} and {value.dtype}")
        if not query.device == key.device == value.device:
            raise RuntimeError(f"attention of tensors on {query.device}, {key.device} and {value.device}")
        # Kernels return [batch, token, head, width] in memory, as the following layer reads it.
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        output = torch.empty(shape, dtype=query.dtype, device=query.device).transpose(1, 2)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _histc(states: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count numbers in bins; torch does not know the result's shape on every device."""
    return torch.empty(bins, dtype=states.dtype, device=states.device)


@torch.no_grad()
def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Move or cast a module: torch's way swaps the contents of two fake tensors, which it then refuses."""
    for inner in module.modules() if recurse else (module,):
        for name, parameter in inner._parameters.items():
            if parameter is not None and (moved := fn(parameter)) is not parameter:
                inner._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = fn(buffer)
    return module


class _Stream(torch.cpu.Stream):
    def __init__(self, priority: int = 0) -> None:
        super().__init__()
        self._priority = priority

    def record_event(self) -> Any:
        """Return an event where FSDP2 requires one of every device but the CPU: where copies sum gradients.

        That is its only stream without priority. Events of all-gathers would have to be real ones.
        """
        return torch.cpu.Event() if self._priority == 0 else None


def _device_module() -> ModuleType:
    """Return what torch asks of a device's module: that of the CPU, with one device."""
    module: Any = ModuleType(NAME)
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    module.Stream = _Stream
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.manual_seed_all = lambda seed: None
    # `torch.random.fork_rng` asks every device of the process for it, also after a simulation.
    module.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]


def _register_autocast() -> None:
    """Cast on this device what autocast casts on CUDA; other operations keep the dtypes of their inputs."""
    library: Any = torch.library.Library
    every, aten = library("_", "IMPL"), library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    lists = ((_IN_LOW_PRECISION, None, False), (_IN_FLOAT32, torch.float32, False))
    for names, dtype, sets in (*lists, (_TO_FLOAT32, torch.float32, True)):
        for name in names.split():
            base, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            aten.impl(name, _casting(operation, dtype, sets), "AutocastPrivateUse1")
    _libraries.extend([every, aten])


def _casting(operation: Any, dtype: torch.dtype | None, sets: bool) -> Callable[..., Any]:
    keys: Any = torch._C.DispatchKey
    without = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == NAME
        if not eligible or value.dtype == torch.float64:
            return value
        return value.to(dtype or torch.get_autocast_dtype(NAME))

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(without):
            if not sets:
                return operation(*tree_map(cast, args), **tree_map(cast, kwargs))
            given = kwargs.get("dtype") is not None or any(isinstance(one, torch.dtype) for one in args)
            if not given and args[0].is_floating_point() and args[0].dtype != torch.float64:
                kwargs["dtype"] = dtype
            return operation(*args, **kwargs)

    return call
