"""Weights of ranks in buckets, for engines and model folders, and errors, which are the same on all ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import tiny
from rank_cases import Ranks, make_any, train_any

from rollgym.core.errors import MissingExtra, RunError, UnknownName, UsageError
from rollgym.engines.base import WeightSource
from rollgym.engines.weight_sync.chain import KeptPart, Link, WeightChain
from rollgym.engines.weight_sync.receiver import WeightReceiver, same_bits
from rollgym.engines.weight_sync.wire import Sent, to_wire
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.process_group import ProcessGroup, join_group
from rollgym.trainer.learner.strategies import zero
from rollgym.trainer.learner.weight_export import Piece, in_buckets
from rollgym.trainer.losses.settings import LossConfig

every = pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])


@every
@pytest.mark.parametrize("lora", [None, 4])
def test_buckets_hold_all_weights_once_and_are_no_larger_than_asked(
    pair: Ranks, strategy: str, lora: int | None
) -> None:
    given: dict[str, Any] = {"lora": lora} if lora else {}
    local = make_any("single", **given)
    train_any(local, range(2))
    expected = {name: tensor.numpy() for name, tensor in local.weights().tensors.items()}
    pair("make", "it", strategy, bucket_bytes=5000, **given)
    pair("train", "it", range(2))
    (found, sizes), (nothing, zeros) = pair.try_all("weights", "it")
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(expected[name], abs=1e-4) for name in expected)
    assert not nothing
    assert zeros == [0] * len(sizes)
    largest = max(array.nbytes for array in expected.values())
    assert len(sizes) >= 10
    assert max(sizes) == max(largest, max(size for size in sizes if size <= 5000))
    assert sum(sizes) == sum(array.nbytes for array in expected.values())
    pair("drop", "it")


@every
@pytest.mark.parametrize("lora", [None, 4])
def test_parts_of_all_ranks_are_the_gathered_weights(pair: Ranks, strategy: str, lora: int | None) -> None:
    given: dict[str, Any] = {"lora": lora} if lora else {}
    pair("make", "it", strategy, bucket_bytes=5000, **given)
    receiver = WeightReceiver()
    links: list[Link] = []
    for step in range(3):
        pair("train", "it", [step])
        (gathered, sizes), _ = pair.try_all("weights", "it")
        by_rank = pair.try_all("parts", "it", step == 0)
        assert [len(one) for one in by_rank] == [len(sizes)] * 2
        link = Link(links[-1].stamp if links else None)
        for number in range(len(sizes)):
            link.publish([KeptPart(one[number][0]) for one in by_rank], Sent())
        link.end()
        links.append(link)
        received = receiver.complete(WeightChain(links, delta=True))
        assert receiver.fulls == 1
        assert received.keys() == gathered.keys()
        for name, array in gathered.items():
            assert same_bits(received[name], to_wire(torch.from_numpy(array), "bfloat16")), name
        shares = [sum(sent.values for _, sent in one) for one in by_rank]
        assert sum(shares) == sum(array.size for array in gathered.values())
        if lora is None:
            assert max(shares) < 0.6 * sum(shares), "no rank has all"
    pair("drop", "it")


def test_neighbours_share_a_bucket_and_a_giant_is_alone() -> None:
    pieces = [Piece(str(n), n, (), lambda tensors: tensors[0]) for n in (1, 2, 10, 1, 1, 1)]
    assert [[piece.numel for piece in one] for one in in_buckets(pieces, 12)] == [[1, 2], [10], [1, 1, 1]]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_an_engine_takes_buckets_while_all_ranks_gather(pair: Ranks, strategy: str) -> None:
    from rollgym.engines.base import GenerateRequest, Sampling

    pair("make", "it", strategy, bucket_bytes=5000)
    (before, after) = pair("reply_of_engine", "it")
    asked = GenerateRequest(request_id="1", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=8))
    assert (before[2], after[2]) == (0, 3)
    assert after[:2] != before[:2]
    ids = torch.tensor([[*asked.prompt_ids, *after[0]]])
    with torch.no_grad():
        said = torch.log_softmax(tiny()(input_ids=ids).logits[0], -1)
    expected = [float(said[2 + n, token]) for n, token in enumerate(after[0])]
    assert list(after[1]) == pytest.approx(expected, abs=1e-4)
    # Going on: gathering for the engine has left nothing behind in what is trained.
    pair("train", "it", range(2))
    pair("drop", "it")


@every
def test_an_exported_policy_is_a_model_that_anything_can_load(
    pair: Ranks, tmp_path: Path, strategy: str
) -> None:
    from transformers import AutoModelForCausalLM

    for name, size in (("one", 10**6), ("many", 20_000)):
        folder = tmp_path / name
        folder.mkdir()
        pair("make", "it", strategy, bucket_bytes=size)
        pair("train", "it", [0])
        pair("export", "it", folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        weights, _ = pair("weights", "it")
        assert len(list(folder.glob("*.safetensors"))) == (1 if name == "one" else len(pieces(weights, size)))
        assert all(np.array_equal(t.detach().numpy(), weights[n]) for n, t in loaded.named_parameters())
    pair("drop", "it")


def pieces(weights: dict[str, Any], size: int) -> list[Any]:
    return in_buckets([Piece(n, a.size, (), lambda tensors: tensors[0]) for n, a in weights.items()], size)


@every
def test_a_bad_number_on_one_rank_is_the_same_error_on_all_and_leaves_the_weights(
    pair: Ranks, strategy: str
) -> None:
    pair("make", "it", strategy, loss="reinforce")
    pair("train", "it", [0])
    before, _ = pair("weights", "it")
    first, second = pair.try_all("poison", "it", 2)
    assert isinstance(first, RunError)
    assert str(first) == str(second)
    assert "gradient is not finite" in str(first)
    after, _ = pair("weights", "it")
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert np.isfinite(pair("train", "it", [1])[0]["grad_norm"])
    pair("drop", "it")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_an_error_on_the_others(strategy: str) -> None:
    ranks = Ranks(2, timeout=30)
    try:
        ranks("make", "it", strategy)
        ranks("train", "it", [0])
        ranks.post("die", ranks=[1])
        ranks.post("train", "it", [1], ranks=[0])
        (error,) = ranks.answers([0])
        assert isinstance(error, RunError)
        assert "Learner rank 0 of 2 could not update (another rank may be lost)" in str(error)
    finally:
        ranks.close()


def test_joining_times_out_without_the_other_ranks() -> None:
    from rollgym.trainer.learner.process_group import free_port

    with pytest.raises(RunError, match="Rank 1 of 2 could not join the others at 127.0.0.1:.* within 1 s"):
        join_group(1, 2, "127.0.0.1", free_port(), timeout=1)


def test_a_port_in_use_is_one_sentence() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            RunError, match=rf"^Port {port} on 127\.0\.0\.1, rank 0's rendezvous, is in use: choose another"
        ):
            join_group(0, 1, "127.0.0.1", port, timeout=5)


def test_mistakes_raise_one_sentence_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    config, loss = LearnerConfig(device="cpu"), LossConfig("grpo")

    def make(strategy: str, world: int = 1, **options: Any) -> Learner:
        return Learner(tiny(), config, loss, LearnerOptions(**options), strategy=strategy, world=world)

    with pytest.raises(UsageError, match="Rank 2 is out of range: 2 ranks are 0 to 1"):
        join_group(2, 2, "127.0.0.1", 1)
    with pytest.raises(UsageError, match="call join_group"):
        ProcessGroup(0, 1)
    with pytest.raises(UnknownName, match="no strategy called 'zero4'.*zero"):
        make("zero4")
    with pytest.raises(UsageError, match=r"strategy=ddp does not support CPU offload: choose one of fsdp2, "):
        make("ddp", cpu_offload=True)
    with pytest.raises(UsageError, match="strategy=ddp cannot share a model"):
        make("ddp", share_model=True)
    message = r"^strategy=single needs exactly 1 rank, got 2\. For several ranks choose one of ddp, fsdp2, "
    with pytest.raises(UsageError, match=message):
        make("single", world=2)
    with pytest.raises(UsageError, match="call join_group"):
        make("ddp")
    with pytest.raises(UsageError, match="bucket_bytes must be at least 1"):
        make("ddp", bucket_bytes=0)
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[distributed\]"):
        zero.import_deepspeed()
    with pytest.raises(ValueError, match="a weight source needs exactly one of tensors, path and buckets"):
        WeightSource(tensors={}, buckets=lambda: [])


def test_a_wrong_rank_is_an_error(pair: Ranks) -> None:
    for error in pair.try_all("mistake_the_rank"):
        assert isinstance(error, UsageError)
        assert "not as rank 0 of 5" in str(error)
