"""Routed experts that SGLang and vLLM report with replies; the servers here are scripted."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import as_json, model_folder, reply, scripted
from scripted_vllm import scripted_vllm, vllm_reply

from rollgym.core.errors import AgentError
from rollgym.engines import sglang, vllm
from rollgym.engines.base import GenerateRequest, Generation, Sampling
from rollgym.engines.servers.routed_experts import token_bytes
from rollgym.models.hf_files import ExpertShape, HFModelFiles

MOE = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_local_experts": 8}
PROMPT, NEW = 5, 4


def chosen(tokens: int = PROMPT + NEW - 1) -> Any:
    """Experts ``[tokens, 3 layers, 2 choices]``."""
    return np.arange(tokens * 6).reshape(tokens, 3, 2) % 8


def npy(values: Any) -> str:
    with io.BytesIO() as file:
        np.save(file, values)
        return base64.b64encode(file.getvalue()).decode()


def int32(values: Any) -> str:
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


def ask_sglang(folder: Path, text: str | None, *, reports: bool = True) -> tuple[Generation, list[Any]]:
    with scripted() as server:
        server.info["enable_return_routed_experts"] = reports

        def answer(body: Any) -> tuple[int, bytes]:
            made = reply(body)
            made["meta_info"]["routed_experts"] = text
            return as_json(made)

        server.scripts["/generate"] = answer
        made = asyncio.run(ask(sglang.SglangEngine(server.url, folder)))
        return made, server.asked("/generate")


def ask_vllm(folder: Path, text: str | None, *, reports: bool = True) -> Generation:
    with scripted_vllm() as server:
        server.facts["routed_experts"] = reports

        def answer(body: Any) -> tuple[int, bytes]:
            made = vllm_reply(body, version=server.weights)
            made["choices"][0]["routed_experts"] = text
            return as_json(made)

        server.scripts["/inference/v1/generate"] = answer
        return asyncio.run(ask(vllm.VllmEngine(server.url, folder, route="disk")))


async def ask(engine: Any) -> Generation:
    prompt = tuple(range(1, PROMPT + 1))
    sampling = Sampling(max_tokens=NEW)
    try:
        made: Generation = await engine.generate(
            GenerateRequest(request_id="r", prompt_ids=prompt, sampling=sampling)
        )
        return made
    finally:
        await engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model", **MOE)


def test_experts_of_all_tokens_but_the_last_are_part_of_the_reply(folder: Path) -> None:
    made, bodies = ask_sglang(folder, int32(chosen()))
    assert [body["return_routed_experts"] for body in bodies] == [True]
    for one in (made, ask_vllm(folder, npy(chosen().astype(np.uint8)))):
        assert one.routed_experts is not None
        assert one.routed_experts.bytes_per_choice == 1
        np.testing.assert_array_equal(one.routed_experts.to_array(), chosen())
        turn = one.experts_of_turn(PROMPT, PROMPT)
        assert turn is not None
        assert turn.num_tokens == PROMPT + NEW - 1


def test_servers_that_report_none_are_not_asked(folder: Path, tmp_path: Path) -> None:
    made, (body,) = ask_sglang(folder, None, reports=False)
    assert made.routed_experts is None
    assert "return_routed_experts" not in body
    assert ask_vllm(folder, None, reports=False).routed_experts is None
    dense, (body,) = ask_sglang(model_folder(tmp_path / "dense"), int32(chosen()))
    assert dense.routed_experts is None
    assert "return_routed_experts" not in body


@pytest.mark.parametrize("wrong", ["short", "long", "an id", "no base64", "nothing"])
def test_experts_of_something_else_are_an_error(folder: Path, wrong: str) -> None:
    values = {"short": chosen(3), "long": chosen(PROMPT + NEW), "an id": chosen() + 1}.get(wrong)
    for kind in (int32, npy):
        text = {"no base64": "!", "nothing": ""}.get(wrong) if values is None else kind(values)
        with pytest.raises(AgentError, match="returned invalid routed experts"):
            ask_sglang(folder, text) if kind is int32 else ask_vllm(folder, text)


@pytest.mark.parametrize("experts", [255, 256, 512])
def test_many_experts_take_two_bytes(tmp_path: Path, experts: int) -> None:
    folder = model_folder(tmp_path / "model", **{**MOE, "num_local_experts": experts})
    values = chosen() + experts - 8
    made = ask_vllm(folder, npy(values.astype(np.uint16)))
    assert made.routed_experts is not None
    assert made.routed_experts.bytes_per_choice == (1 if experts < 256 else 2)
    np.testing.assert_array_equal(made.routed_experts.to_array(), values)


def test_the_shape_comes_from_the_config(tmp_path: Path) -> None:
    shape = HFModelFiles.read(model_folder(tmp_path / "one", **MOE)).experts
    assert shape == ExpertShape(3, 2, 8)
    assert token_bytes(shape) == 36
    inner = {"text_config": {**MOE, "vocab_size": 9, "num_local_experts": None, "n_routed_experts": 4}}
    assert HFModelFiles.read(model_folder(tmp_path / "two", **inner)).experts == ExpertShape(3, 2, 4)
    assert HFModelFiles.read(model_folder(tmp_path / "three", num_hidden_layers=3)).experts is None
    assert token_bytes(None) == 0


def test_servers_are_started_with_the_flag(folder: Path) -> None:
    flag = "--enable-return-routed-experts"
    for options in (sglang.ServerOptions, vllm.ServerOptions):
        assert flag in options(return_routed_experts=True).command(folder, 7, 0)
        assert flag not in options().command(folder, 7, 0)
    assert vllm.ServerOptions(return_routed_experts=True).environment()["VLLM_USE_V2_MODEL_RUNNER"] == "1"
