"""The default route of weights to a server, and the dtype in which they travel."""

import asyncio
import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_server import model_folder, scripted

from rollgym.engines.base import WeightSource
from rollgym.engines.servers.route_choice import SMALL, choose_route
from rollgym.engines.sglang import SglangEngine

ALL = ("tensor", "group", "disk")
HERE = {"nbytes": 10 * SMALL, "local": True, "host": False, "shares_gpu": False}


@pytest.mark.parametrize(
    ("supported", "changes", "expected"),
    [
        (ALL, {}, "group"),
        (ALL, {"small": SMALL}, "group"),
        (ALL, {"small": SMALL, "nbytes": SMALL - 1}, "tensor"),
        (ALL, {"nbytes": SMALL - 1}, "group"),
        (ALL, {"local": False}, "tensor"),
        (ALL, {"local": False, "host": True}, "group"),
        (ALL, {"local": False, "host": True, "shares_gpu": True}, "group"),
        (ALL, {"shares_gpu": True}, "disk"),
        (("disk",), {}, "disk"),
        (("tensor",), {}, "tensor"),
    ],
)
def test_engine_placement_and_size_decide(supported: Any, changes: dict[str, Any], expected: str) -> None:
    choice = choose_route(supported, **{**HERE, **changes})
    assert choice.route == expected
    assert choice.reason


@pytest.mark.parametrize(
    ("reported", "in_config", "expected"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", None, torch.float32),
        ("float32", "bfloat16", torch.float32),
        (None, "bfloat16", torch.float32),
        ("fp8", "bfloat16", torch.float32),
    ],
)
def test_servers_get_their_own_dtype(
    tmp_path: Path, reported: str | None, in_config: str | None, expected: torch.dtype
) -> None:
    folder = model_folder(tmp_path / "model", **({"dtype": in_config} if in_config else {}))
    tensors = {"a": torch.randn(4, 4), "b": torch.randn(4)}
    with scripted() as server:
        server.info |= {"dtype": reported, "version": "0.5.18"}

        async def main() -> None:
            engine = SglangEngine(server.url, folder)
            assert (engine.route, engine.weight_route) == ("tensor", "tensor")
            await engine.update_weights(1, WeightSource(tensors=tensors))
            await engine.close()

        asyncio.run(main())
        (body,) = server.asked("/update_weights_from_tensor")
    sent = dict(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))  # noqa: S301
    assert sent.keys() == tensors.keys()
    for name, tensor in tensors.items():
        kept = tensor.to(expected if tensor.dim() > 1 else torch.float32)
        assert sent[name].dtype == kept.dtype
        assert torch.equal(sent[name], kept)
