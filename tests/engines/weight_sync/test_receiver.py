"""Engines have the bits of a full update, whatever they missed and however many ranks send."""

import pickle
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.weight_sync.chain import Handle, KeptPart, Link, WeightChain
from rollgym.engines.weight_sync.folder import clean_folder, write_part
from rollgym.engines.weight_sync.receiver import Mismatch, WeightReceiver, same_bits
from rollgym.engines.weight_sync.wire import (
    Chunk,
    LocalShard,
    Part,
    Sent,
    ShardEncoder,
    WireFormat,
    to_wire,
    wire_bytes,
)

SHAPES = {"embed": (40, 8), "norm": (8,), "experts": (3, 6, 8), "head": (40, 8)}
BUCKETS = (("embed", "norm"), ("experts",), ("head",))
DELTA = WireFormat(dtype="bfloat16", delta=True, full_every=4)


def cut(tensor: Tensor, rank: int, how: str) -> LocalShard | None:
    """A share of a tensor on one of three ranks: rows, columns, or a range of the flat tensor."""
    if how == "range":
        part = tensor.reshape(-1).tensor_split(3)[rank]
        before = sum(len(one) for one in tensor.reshape(-1).tensor_split(3)[:rank])
        return LocalShard(part, (tensor.numel(),), (before,))
    dim = tensor.dim() - 1 if how == "columns" else 0
    parts = tensor.tensor_split(3, dim)
    offsets = [0] * tensor.dim()
    offsets[dim] = sum(one.shape[dim] for one in parts[:rank])
    return LocalShard(parts[rank], tuple(tensor.shape), tuple(offsets))


class Ranks:
    """Three ranks that train and send."""

    def __init__(self, wire: WireFormat = DELTA, how: str = "rows", folder: Path | None = None) -> None:
        self.wire, self.how, self.folder = wire, how, folder
        self.rng = torch.Generator().manual_seed(3)
        self.weights = {name: torch.randn(shape, generator=self.rng) * 0.1 for name, shape in SHAPES.items()}
        self.encoders = [ShardEncoder(wire) for _ in range(3)]
        self.links: list[Link] = []
        self.damage: Any = None

    def step(self, rate: float = 1e-4) -> None:
        for tensor in self.weights.values():
            tensor += rate * torch.randn(tensor.shape, generator=self.rng)

    def send(self) -> WeightChain:
        full = not self.wire.delta or not 0 < len(self.links) < self.wire.full_every
        link = Link(None if full else self.links[-1].stamp)
        self.links = [link] if full else [*self.links, link]
        for number, names in enumerate(BUCKETS):
            handles: list[Handle] = []
            sent = []
            for rank in range(3):
                part, counts = self.part(rank, names, full)
                sent.append(counts)
                if self.folder is None:
                    handles.append(KeptPart(part))
                else:
                    handles.append(write_part(self.folder, link.stamp, number, rank, part))
            link.publish(handles, reduce(Sent.plus, sent))
        link.end()
        return WeightChain(self.links, delta=self.wire.delta)

    def part(self, rank: int, names: tuple[str, ...], full: bool) -> tuple[Part, Sent]:
        part, sent = [], Sent()
        for name in names:
            shard = cut(self.weights[name], rank, self.how)
            if shard is not None:
                chunk, counts = self.encoders[rank].encode(name, SHAPES[name], shard, full=full)
                part.append(self.damage(chunk) if self.damage else chunk)
                sent = sent.plus(counts)
        return part, sent

    def expected(self) -> dict[str, Tensor]:
        return {name: to_wire(tensor, self.wire.dtype) for name, tensor in self.weights.items()}


def check(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    expected = ranks.expected()
    assert tensors.keys() == expected.keys()
    assert all(same_bits(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("how", ["rows", "columns", "range"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_receivers_that_missed_updates_have_the_same_bits(how: str, on_disk: bool, tmp_path: Path) -> None:
    ranks = Ranks(how=how, folder=tmp_path / "parts" if on_disk else None)
    always, sometimes = WeightReceiver(), WeightReceiver()
    sizes = []
    for version in range(10):
        ranks.step()
        chain = ranks.send()
        sizes.append(chain.sent.nbytes)
        check(always.complete(chain), ranks)
        if version in (0, 2, 3, 7):  # missed one, none, and a whole chain
            check(sometimes.complete(chain), ranks)
        if version == 5:
            again = pickle.loads(pickle.dumps(chain)) if on_disk else chain  # noqa: S301
            check(WeightReceiver().complete(again), ranks)
    assert [len(ranks.links), always.fulls, sometimes.fulls] == [2, 3, 2]
    full = wire_bytes(list(ranks.weights.values()), "bfloat16")
    assert all((size == full) == (version % 4 == 0) for version, size in enumerate(sizes))
    assert always.complete(chain) is always.tensors, "the same version again is no work"


def test_matrices_travel_in_the_engines_dtype_and_vectors_as_they_are() -> None:
    ranks = Ranks(WireFormat(dtype="bfloat16"))
    received = WeightReceiver().complete(ranks.send())
    assert {name: tensor.dtype for name, tensor in received.items()} == {
        name: torch.float32 if len(shape) == 1 else torch.bfloat16 for name, shape in SHAPES.items()
    }
    exact = Ranks(WireFormat())
    received = WeightReceiver().complete(exact.send())
    assert all(same_bits(received[name], tensor) for name, tensor in exact.weights.items())
    assert not exact.encoders[0]._last, "without deltas nothing is kept"


def test_a_restarted_receiver_takes_the_full_update_and_the_deltas() -> None:
    ranks, receiver = Ranks(), WeightReceiver()
    for _ in range(3):
        ranks.step()
        chain = ranks.send()
    assert [link.base is None for link in chain.links] == [True, False, False]
    check(receiver.complete(chain), ranks)
    receiver.reset()
    assert receiver.stamp is None
    check(receiver.complete(chain), ranks)
    assert receiver.fulls == 2


def test_buckets_are_taken_while_others_are_on_their_way() -> None:
    ranks, receiver = Ranks(), WeightReceiver()
    for expected_fulls in (1, 1, 1):
        ranks.step()
        chain = ranks.send()
        last = chain.last
        for number, handles in enumerate(last.buckets[:2]):
            receiver.take(last.stamp, last.base, number, handles)
        assert receiver.stamp is None, "half of an update is no version"
        check(receiver.complete(chain), ranks)
        assert receiver.fulls == expected_fulls
    # One that was broken off leaves nothing behind that the next could build on.
    ranks.step()
    last = ranks.send().last
    receiver.take(last.stamp, last.base, 0, last.buckets[0])
    ranks.step()
    chain = ranks.send()
    receiver.take(chain.last.stamp, chain.last.base, 0, chain.last.buckets[0])
    check(receiver.complete(chain), ranks)
    # A bucket out of order is ignored.
    receiver.take("other", None, 1, chain.last.buckets[1])
    check(receiver.complete(chain), ranks)


def test_a_damaged_copy_is_noticed_and_replaced_from_the_full_update() -> None:
    ranks, receiver = Ranks(), WeightReceiver()
    check(receiver.complete(ranks.send()), ranks)
    receiver.tensors["experts"].view(torch.int16)[1, 2, 3] += 1
    ranks.step()
    check(receiver.complete(ranks.send()), ranks)
    assert receiver.fulls == 2


def wrong_value(chunk: Chunk) -> Chunk:
    data = chunk.arrays[0].copy()
    data[-1] ^= 4
    return chunk._replace(arrays=(data,)) if chunk.name == "head" and chunk.whole else chunk


def wrong_step(chunk: Chunk) -> Chunk:
    if chunk.name != "head" or chunk.whole:
        return chunk
    gaps, steps, words = chunk.arrays
    return chunk._replace(arrays=(gaps, -steps, words))


def test_damage_that_stays_is_an_error_and_the_next_update_heals_it() -> None:
    ranks, receiver = Ranks(), WeightReceiver()
    ranks.damage = wrong_value
    with pytest.raises(Mismatch, match="values of head were damaged"):
        receiver.complete(ranks.send())
    ranks.damage, ranks.links = None, []
    check(receiver.complete(ranks.send()), ranks)
    ranks.damage = wrong_step
    ranks.step()
    with pytest.raises(Mismatch, match="head does not lead to the values that were sent"):
        receiver.complete(ranks.send())
    assert receiver.stamp is None
    ranks.damage, ranks.links = None, []
    check(receiver.complete(ranks.send()), ranks)


def test_a_rank_that_sends_nothing_is_noticed() -> None:
    ranks = Ranks()
    chain = ranks.send()
    chain.last.buckets[1] = chain.last.buckets[1][:2]
    with pytest.raises(Mismatch, match="The ranks sent 96 of the 144 values of experts"):
        WeightReceiver().complete(chain)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    ranks = Ranks(folder=tmp_path)
    chain = ranks.send()
    ranks.step()
    later = ranks.send()
    clean_folder(tmp_path, {later.last.stamp})
    assert len(list(tmp_path.iterdir())) == 9
    with pytest.raises(EngineLost, match="Cannot read new weights from .*a disk that all nodes share"):
        WeightReceiver().complete(chain)
    clean_folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_number_of_deltas_must_be_positive() -> None:
    with pytest.raises(UsageError, match="full_update_every must be at least 1, not 0"):
        WireFormat(full_every=0)


def test_a_chain_is_a_mapping_of_tensors() -> None:
    ranks = Ranks()
    chain = ranks.send()
    assert list(chain) == list(SHAPES)
    assert len(chain) == len(SHAPES)
    assert np.array_equal(chain["norm"].numpy(), ranks.weights["norm"].numpy())
