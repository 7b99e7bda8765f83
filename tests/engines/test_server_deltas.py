"""Weight updates of servers that send only what changed; the servers are scripted, or a receiver alone."""

import asyncio
import base64
import importlib
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_server import as_json, model_folder, scripted
from scripted_vllm import scripted_vllm
from torch import Tensor

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines import sglang, vllm
from rollgym.engines.base import WeightSource
from rollgym.engines.servers.server_process import DELTA_PLUGIN
from rollgym.engines.servers.weight_delta import DeltaEncoder
from rollgym.engines.sglang.server import LOADER, PLUGIN
from rollgym.engines.weight_sync.server_plugin.rollgym_deltas import PACKED, DeltaReceiver

TENSOR_PATH = "/update_weights_from_tensor"
Tensors = dict[str, Tensor]


def weights(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(64, 33).bfloat16(),
        "b": torch.randn(40, 20).bfloat16(),
        "norm": torch.randn(33),
        "odd": torch.randn(3, 1).bfloat16(),
    }


def moved(tensors: Mapping[str, Tensor], *names: str) -> Tensors:
    """The same weights, some values of these tensors changed."""
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in names:
        new[name].view(-1)[:: max(new[name].numel() // 8, 1)] *= 1.01
    return new


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("bucket", [1 << 20, 3000, 1])
def test_a_server_gets_the_bits_of_full_updates_from_a_part_of_the_bytes(bucket: int) -> None:
    encoder, receiver = DeltaEncoder(full_every=3), DeltaReceiver()
    loaded: Tensors = {}
    tensors, fulls, names = weights(), [], []
    for changes in ((), ("a", "norm"), ("odd",), ("b",), ("a", "b")):
        tensors = moved(tensors, *changes)
        update = encoder.encode(tensors, packed=True, bucket=bucket)
        taken = [receiver.take(packed) for ((_, packed),) in update.buckets]
        names.append({name for part in taken for name, _ in part})
        loaded |= {name: tensor.clone() for part in taken for name, tensor in part}
        encoder.received(update, tensors, "1", packed=True)
        fulls.append(update.full)
        assert same(loaded, tensors)
        assert receiver.stamp == update.stamp
        assert update.sent.nbytes == sum(one.nbytes for ((_, one),) in update.buckets)
    assert fulls == [True, False, False, True, False]
    assert names == [{"a", "b", "norm", "odd"}, {"a", "norm"}, {"odd"}, {"a", "b", "norm", "odd"}, {"a", "b"}]


def test_few_changed_values_are_few_bytes() -> None:
    encoder = DeltaEncoder(full_every=9)
    old = {"a": torch.randn(300, 300).bfloat16()}
    full = encoder.encode(old, packed=True, bucket=1 << 20)
    encoder.received(full, old, "1", packed=True)
    delta = encoder.encode(moved(old, "a"), packed=True, bucket=1 << 20)
    assert delta.sent.nbytes < 2000 < full.sent.nbytes // 80
    assert (delta.sent.values, delta.sent.changed) == (90_000, 8)


def test_a_delta_to_other_weights_and_a_damaged_one_are_rejected() -> None:
    encoder, receiver = DeltaEncoder(full_every=9), DeltaReceiver()
    tensors = weights()

    def buckets(new: Tensors, size: int = 1 << 20) -> list[Tensor]:
        update = encoder.encode(new, packed=True, bucket=size)
        encoder.received(update, new, "1", packed=True)
        return [packed for ((_, packed),) in update.buckets]

    (first,) = buckets(tensors)
    tensors = moved(tensors, "a")
    (second,) = buckets(tensors)
    with pytest.raises(ValueError, match="a delta to other weights"):
        receiver.take(second)
    receiver.take(first)
    damaged = second.clone()
    damaged[-8] ^= 1
    with pytest.raises(ValueError, match="does not lead to the values that were sent"):
        receiver.take(damaged)
    with pytest.raises(ValueError, match="a delta to other weights"):  # it has a part of the damaged one
        receiver.take(second)
    with pytest.raises(ValueError, match="bytes, its tensors need"):
        receiver.take(first[:-8])
    encoder.reset()
    _, rest, *_ = buckets(tensors, 1)
    with pytest.raises(ValueError, match="the first bucket of the update is missing"):
        receiver.take(rest)


def test_without_the_plugin_tensors_are_whole_and_unchanged_ones_stay_out() -> None:
    encoder, tensors = DeltaEncoder(full_every=9), weights()
    sent = []
    for changes in ((), ("b",), ()):
        tensors = moved(tensors, *changes)
        update = encoder.encode(tensors, packed=False, bucket=1 << 20)
        encoder.received(update, tensors, "1", packed=False)
        (bucket,) = update.buckets
        sent.append([name for name, tensor in bucket if torch.equal(tensor, tensors[name])])
    assert sent == [["a", "b", "norm", "odd"], ["b"], ["a"]], "one at least sets the version"
    assert encoder.encode(tensors, packed=True, bucket=1 << 20).full, "the servers keep no copy yet"
    with pytest.raises(UsageError, match="full_update_every must be at least 1, not 0"):
        DeltaEncoder(0)


def sent_to_sglang(bodies: list[Any]) -> list[list[tuple[str, Tensor]]]:
    return [pickle.loads(base64.b64decode(one["serialized_named_tensors"][0])) for one in bodies]  # noqa: S301


@pytest.mark.parametrize("plugin", [True, False])
def test_sglang_gets_values_with_the_plugin_and_tensors_without(tmp_path: Path, plugin: bool) -> None:
    tensors = weights()
    history = [tensors, moved(tensors, "a"), moved(tensors, "a", "b")]
    with scripted() as server:
        server.info |= {"dtype": "bfloat16", "version": "0.5.18"}
        server.info["custom_weight_loader"] = [LOADER] if plugin else None

        async def main() -> list[int | None]:
            folder = model_folder(tmp_path / "model")
            engine = sglang.SglangEngine(server.url, folder, route="tensor", delta=True)
            sent = []
            for number, one in enumerate(history):
                await engine.update_weights(number + 1, WeightSource(tensors=one))
                sent.append(engine.weight_bytes_sent)
            await engine.close()
            return sent

        first, second, _ = asyncio.run(main())
        bodies = server.asked(TENSOR_PATH)
        assert server.weights == "3"
    assert first is not None
    assert second is not None
    assert second < first
    assert {body.get("load_format") for body in bodies} == ({LOADER} if plugin else {None})
    receiver, loaded = DeltaReceiver(), dict[str, Tensor]()
    for number, bucket in enumerate(sent_to_sglang(bodies)):
        assert (bucket[0][0] == PACKED) is plugin
        loaded |= receiver.take(bucket[0][1]) if plugin else bucket
        assert same(loaded, history[number])


def test_a_delta_that_a_server_refuses_is_sent_again_in_full(tmp_path: Path) -> None:
    tensors = weights()
    failures = [False, True, False, False]
    with scripted_vllm() as server:
        server.facts |= {"dtype": "bfloat16", "deltas": True}

        def update(_: Any) -> tuple[int, bytes]:
            return as_json({}, 500 if failures.pop(0) else 200)

        server.scripts["/update_weights"] = update

        async def main() -> None:
            folder = model_folder(tmp_path / "model")
            engine = vllm.VllmEngine(server.url, folder, route="tensor", delta=True, retries=0)
            for number, one in enumerate((tensors, moved(tensors, "a"), moved(tensors, "a", "b"))):
                await engine.update_weights(number + 1, WeightSource(tensors=one))
            await engine.close()

        asyncio.run(main())
        sizes = [body["update_info"]["shapes"][0][0] for body in server.asked("/update_weights")]
    assert not failures
    assert sizes[2] == sizes[0]
    assert max(sizes[1], sizes[3]) < sizes[0]


def test_a_full_update_that_is_refused_is_an_error(tmp_path: Path) -> None:
    with scripted_vllm() as server:
        server.scripts["/update_weights"] = lambda _: as_json({}, 500)

        async def main() -> None:
            folder = model_folder(tmp_path / "model")
            engine = vllm.VllmEngine(server.url, folder, route="tensor", delta=True, retries=0)
            with pytest.raises(AgentError, match="answered 500"):
                await engine.update_weights(1, WeightSource(tensors=weights()))
            await engine.close()

        asyncio.run(main())
        assert len(server.asked("/update_weights")) == 1


def test_a_folder_in_between_makes_the_next_update_full(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = weights()
    folder = model_folder(tmp_path / "model")
    save_file(tensors, folder / "model.safetensors")
    with scripted() as server:
        server.info |= {"dtype": "bfloat16", "version": "0.5.18"}

        async def main() -> None:
            engine = sglang.SglangEngine(server.url, folder, route="tensor", delta=True)
            await engine.update_weights(1, WeightSource(tensors=tensors))
            await engine.update_weights(2, WeightSource(path=folder))
            assert engine.weight_bytes_sent is None
            await engine.update_weights(3, WeightSource(tensors=tensors))
            await engine.close()

        asyncio.run(main())
        counts = [len(bucket) for bucket in sent_to_sglang(server.asked(TENSOR_PATH))]
    assert counts == [4, 4]


def test_servers_that_have_other_weights_get_all(tmp_path: Path) -> None:
    tensors = weights()
    with scripted() as server:
        server.info |= {"dtype": "bfloat16", "version": "0.5.18"}

        async def main() -> None:
            engine = sglang.SglangEngine(
                server.url, model_folder(tmp_path / "model"), route="tensor", delta=True
            )
            await engine.update_weights(1, WeightSource(tensors=tensors))
            await engine.update_weights(2, WeightSource(tensors=tensors))
            server.weights = "0"  # restarted by another program
            await engine.update_weights(3, WeightSource(tensors=tensors))
            await engine.update_weights(4, WeightSource(tensors=tensors))
            await engine.sleep()
            await engine.update_weights(5, WeightSource(tensors=tensors))
            await engine.sleep()
            await engine.wake_up()
            await engine.close()

        asyncio.run(main())
        counts = [len(bucket) for bucket in sent_to_sglang(server.asked(TENSOR_PATH))]
    assert counts == [4, 1, 4, 1, 4, 4], "released memory has no weights to change"


def test_servers_with_deltas_see_the_plugin(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    options = sglang.ServerOptions(weight_delta=True, device="cpu", env={"PYTHONPATH": "/its"})
    words = options.command(folder, 7, 3)
    assert words[words.index("--custom-weight-loader") + 1] == LOADER
    assert options.environment()["PYTHONPATH"] == f"{PLUGIN}:{DELTA_PLUGIN}:/its"
    plain = sglang.ServerOptions(device="cpu")
    assert "--custom-weight-loader" not in plain.command(folder, 7, 3)
    assert "PYTHONPATH" not in plain.environment()
    assert vllm.ServerOptions(weight_delta=True).environment()["PYTHONPATH"].endswith(f":{DELTA_PLUGIN}")


def test_the_loader_of_sglang_changes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names with which a server imports it; tests/engines/sglang/test_real.py runs it in a real one."""
    for path in (PLUGIN, DELTA_PLUGIN):
        monkeypatch.syspath_prepend(str(path))
    module, name = LOADER.rsplit(".", 1)
    load = getattr(importlib.import_module(module), name)

    class Model(torch.nn.Module):
        def load_weights(self, named: list[tuple[str, Tensor]]) -> None:
            loaded.update({key: tensor.clone() for key, tensor in named})

    loaded: Tensors = {}
    model, encoder, tensors = Model(), DeltaEncoder(full_every=9), weights()
    for changes in ((), ("b", "norm")):
        tensors = moved(tensors, *changes)
        update = encoder.encode(tensors, packed=True, bucket=100)
        for bucket in update.buckets:
            load(model, list(bucket))
        encoder.received(update, tensors, "1", packed=True)
        assert same(loaded, tensors)
    for plugin in (module, "rollgym_deltas"):
        sys.modules.pop(plugin)
