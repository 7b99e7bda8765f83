"""Prefix cache: a radix tree over token ids whose nodes hold blocks of keys and values.

The tree is shared by all requests and sessions. A node's block holds the keys and values of its ids, given
the ids on the path to it, so a prefix that many requests have in common is stored, and computed, once. A
block has as many tokens as its node has ids; a node splits where a new sequence branches off, so prefixes are
shared to the token.

Running sequences and idle sessions hold references to the node where their prefix ends. Eviction takes
leaves only: first those without references, then those of idle sessions, then those of running sequences
(which have their own copy in the `KVCache`); the least recently used first in each case.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollgym.engines.embedded.kv_cache import KVBlock

__all__ = ["Hit", "Node", "PrefixCache", "common_prefix"]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two id sequences."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # compares whole slices, in C, and halves
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Node:
    """A block of keys and values and the ids it belongs to."""

    __slots__ = ("block", "children", "ids", "parent", "running", "sessions", "states", "used")

    def __init__(self, ids: list[int], block: KVBlock, parent: Node | None) -> None:
        self.ids = ids
        self.block = block
        self.parent = parent
        """None for the root and for nodes that were removed from the tree."""
        self.children: dict[int, Node] = {}
        """By the first id of the child."""
        self.running = 0
        """Number of running sequences whose prefix ends here."""
        self.sessions: set[str] = set()
        """Idle or running sessions whose prefix ends here."""
        self.states: dict[int, Tensor] = {}
        """Last hidden states after some of the ids, by index: the next token can be sampled again without a
        pass of the model. Small beside keys and values, and not counted."""
        self.used = 0
        """Time of the last use, on the cache's own clock."""

    @property
    def references(self) -> int:
        """Number of running sequences and sessions whose prefix ends here."""
        return self.running + len(self.sessions)


Hit = list[tuple[Node, int]]
"""The nodes of a cached prefix in order, with the number of tokens used of each."""


class PrefixCache:
    """Keys and values of prefixes, least recently used ones evicted first."""

    def __init__(self) -> None:
        self._root = Node([], KVBlock(torch.empty(0)), None)
        self._sessions: dict[str, Node] = {}
        self._clock = 0
        self.tokens = 0
        """Tokens of all blocks."""
        self.insertions = 0
        """Times that something new was stored."""
        self.evicted_tokens = 0
        self.evicted_sessions = 0
        """Sessions that lost a part of their prefix to eviction."""

    @property
    def sessions(self) -> int:
        """Number of sessions that hold a reference."""
        return len(self._sessions)

    def has_session(self, session: str) -> bool:
        """Return True if the session's whole prefix is cached."""
        return session in self._sessions

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes, parents before children."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match(self, ids: Sequence[int], limit: int) -> Hit:
        """Return the longest cached prefix of ``ids[:limit]`` and mark it as used."""
        self._clock += 1
        node, at, hit = self._root, 0, []
        while at < limit:
            child = node.children.get(ids[at])
            if child is None:
                break
            count = _matching(child.ids, ids, at, limit)
            child.used = self._clock
            hit.append((child, count))
            at += count
            if count < len(child.ids):
                break
            node = child
        return hit

    def state(self, ids: Sequence[int]) -> Tensor | None:
        """Return the last hidden state after all of these ids, if it is cached."""
        hit = self.match(ids, len(ids))
        if sum(count for _, count in hit) != len(ids):
            return None
        node, count = hit[-1]
        return node.states.get(count - 1)

    def add_states(self, ids: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Store the last hidden states at some positions of ids whose prefix is cached."""
        if not states:
            return
        self.insertions += 1
        at = 0
        for node, count in self.match(ids, max(states) + 1):
            for position in range(at, at + count):
                if position in states:
                    node.states.setdefault(position - at, states[position])
            at += count

    def insert(
        self,
        ids: Sequence[int],
        count: int,
        read: Callable[[int], KVBlock],
        *,
        session: str = "",
        held: Node | None = None,
    ) -> Node:
        """Store the prefix ``ids[:count]`` and return the node that holds its last token.

        Args:
            ids: The ids of a sequence.
            count: Number of ids to store: at least one.
            read: Returns the keys and values of tokens from a position up to ``count``.
            session: A session whose reference does not keep a leaf from being extended in place.
            held: The same for a node that the caller holds as a running sequence.
        """
        hit = self.match(ids, count)
        at = sum(used for _, used in hit)
        node = hit[-1][0] if hit else self._root
        if at == count:
            return node
        if hit and hit[-1][1] < len(node.ids):
            node = self._split(node, hit[-1][1])
        own = int(node is held) + int(session in node.sessions)
        new = list(ids[at:count])
        self.tokens += len(new)
        if node is not self._root and not node.children and node.references <= own:
            node.ids.extend(new)
            node.block = node.block.joined(read(at))
            return node
        child = Node(new, read(at).clone(), node)
        child.used = self._clock
        node.children[new[0]] = child
        return child

    def missing(self, ids: Sequence[int], count: int) -> int:
        """Return how many tokens `insert` would add."""
        return count - sum(used for _, used in self.match(ids, count))

    def hold(self, session: str, node: Node) -> None:
        """Make a node the end of a session's prefix."""
        self.release(session)
        node.sessions.add(session)
        self._sessions[session] = node

    def release(self, session: str) -> None:
        """Drop the reference of a session; its prefix stays until it is evicted."""
        node = self._sessions.pop(session, None)
        if node is not None:
            node.sessions.discard(session)

    def evict(self, wanted: int, *, slack: int = 0, referenced: bool = True) -> int:
        """Evict leaves until ``wanted`` tokens are free; returns the number of tokens freed.

        Args:
            wanted: Number of tokens to free.
            slack: Tokens to free beyond that, of unreferenced leaves only: looking for leaves takes time.
            referenced: Whether leaves with references may be evicted.
        """
        if wanted <= 0:
            return 0
        heap = [(_rank(node), id(node), node) for node in self.nodes() if not node.children]
        heapq.heapify(heap)
        freed = 0
        while heap:
            (rank, _), _, node = heapq.heappop(heap)
            if freed >= wanted and (rank or freed >= wanted + slack):
                break
            if rank and not referenced:
                break
            parent = node.parent
            freed += self._remove(node)
            if parent is not None and parent is not self._root and not parent.children:
                heapq.heappush(heap, (_rank(parent), id(parent), parent))
        self.evicted_tokens += freed
        return freed

    def clear(self) -> None:
        """Drop everything."""
        for node in self.nodes():
            node.parent = None
        self._root = Node([], KVBlock(torch.empty(0)), None)
        self._sessions.clear()
        self.tokens = 0

    def _split(self, node: Node, count: int) -> Node:
        """Split a node after some tokens and return the first part; references stay with the second part."""
        assert node.parent is not None
        first = Node(node.ids[:count], node.block.part(0, count).clone(), node.parent)
        first.used = node.used
        for at, state in node.states.items():
            if at < count:
                first.states[at] = state
        node.states = {at - count: state for at, state in node.states.items() if at >= count}
        node.parent.children[first.ids[0]] = first
        node.ids, node.block, node.parent = node.ids[count:], node.block.part(count).clone(), first
        first.children[node.ids[0]] = node
        return first

    def _remove(self, leaf: Node) -> int:
        """Remove a leaf; returns its number of tokens."""
        assert leaf.parent is not None
        del leaf.parent.children[leaf.ids[0]]
        leaf.parent = None
        for session in leaf.sessions:
            del self._sessions[session]
            self.evicted_sessions += 1
        leaf.sessions.clear()
        self.tokens -= len(leaf.ids)
        return len(leaf.ids)


def _rank(node: Node) -> tuple[int, int]:
    """Order of eviction: by who holds a reference, then by last use."""
    return (2 if node.running else 1 if node.sessions else 0), node.used


def _matching(block: list[int], ids: Sequence[int], at: int, limit: int) -> int:
    """Return how many ids of a node match those at a position."""
    here = list(ids[at : min(at + len(block), limit)])
    return len(block) if here == block else common_prefix(block, here)
