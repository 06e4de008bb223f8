"""A forest of token sequences: common prefixes are nodes that several sequences go through."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MIN_TOKENS = 128  # sharing fewer saves less than the attention calls for another node cost


class Node(NamedTuple):
    """Rows [start, stop) of a sequence, shared by all sequences that go through this node."""

    sequence: int
    start: int
    stop: int
    parent: int  # index of a node, or -1


class Forest:
    """A forest of token sequences. Common prefixes of fewer than `min_tokens` are not shared; None:
    share nothing.

    Children are found by their first rows (`min_tokens` of them, or all of a shorter node), so
    adding a sequence takes time in proportion to its length, not to the number of sequences.
    """

    def __init__(self, min_tokens: int | None) -> None:
        self.min_tokens = min_tokens
        self.num_tokens = 0
        self._rows: list[np.ndarray] = []  # per sequence, [tokens, ...]
        self._nodes: list[Node] = []
        # order of creation. A split node's upper part keeps the rank, its lower the index.
        self._ranks: list[int] = []
        # by parent, number of rows and rows
        self._children: dict[int, dict[int, dict[bytes, int]]] = defaultdict(dict)
        self._ends: list[int] = []

    def count_new(self, own: np.ndarray) -> int:
        """Return the number of tokens that a sequence would add."""
        return len(own) - self._descend(own)[1]

    def add(self, own: np.ndarray) -> None:
        self._rows.append(own)
        node, at = self._descend(own)
        if node >= 0 and at < self._nodes[node].stop:
            upper = len(self._nodes)
            lower = node
            self._nodes.append(self._nodes[lower]._replace(stop=at))
            self._nodes[lower] = self._nodes[lower]._replace(start=at, parent=upper)
            self._ranks.append(self._ranks[lower])
            self._ranks[lower] = node = upper
            self._link(upper)
            self._link(lower)
        if at < len(own):
            self._nodes.append(Node(len(self._rows) - 1, at, len(own), node))
            node = len(self._ranks)
            self._ranks.append(node)
            self._link(node)
        self._ends.append(node)
        self.num_tokens += len(own) - at

    def sort(self) -> tuple[list[Node], list[int]]:
        """Return the nodes, and the node in which each sequence ends.

        Parents come before children, and the largest subtree comes first, so that attention treats
        long paths as one document and batches answers of equal length.
        """
        nodes = self._nodes
        sizes = [stop - start for _, start, stop, _ in self._nodes]
        children = defaultdict[int, list[int]](list)
        for number in sorted(range(len(nodes)), key=self._ranks.__getitem__):
            children[nodes[number].parent].append(number)
        top_down = list(children[-1])
        for number in top_down:
            top_down += children[number]
        for number in reversed(top_down):
            sizes[number] += sum(sizes[child] for child in children[number])
        order = list[int]()
        stack = sorted(children[-1], key=sizes.__getitem__)
        while stack:
            order.append(stack.pop())
            stack += sorted(children[order[-1]], key=sizes.__getitem__)
        places = {old: new for new, old in enumerate(order)} | {-1: -1}
        ends = [places[end] for end in self._ends]
        return [nodes[old]._replace(parent=places[nodes[old].parent]) for old in order], ends

    def _descend(self, own: np.ndarray) -> tuple[int, int]:
        """Return the last node that a sequence shares in part, and the tokens up to there."""
        at = 0
        node = -1
        if self.min_tokens is None:
            return node, at
        while node < 0 or at == self._nodes[node].stop:
            rest = own[at:]
            matches = [
                by_rows.get(rest[:n].tobytes()) for n, by_rows in self._children[node].items()
            ]
            child = min(
                (match for match in matches if match is not None),
                key=self._ranks.__getitem__,
                default=None,
            )
            if child is None:
                break
            sequence, start, stop, _ = self._nodes[child]
            at = at + _count_equal(rest, self._rows[sequence][start:stop])
            node = child
        return node, at

    def _link(self, node: int) -> None:
        if self.min_tokens is None:
            return
        sequence, start, stop, parent = self._nodes[node]
        first = self._rows[sequence][start:stop][: self.min_tokens]
        self._children[parent].setdefault(len(first), {})[first.tobytes()] = node


def build_forest(rows: Iterable[np.ndarray], min_tokens: int) -> tuple[list[Node], list[int]]:
    """Return the sorted nodes of a forest of sequences, and the node in which each ends."""
    forest = Forest(min_tokens)
    for own in rows:
        forest.add(own)
    return forest.sort()


def _count_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Count equal leading rows."""
    size = min(len(a), len(b))
    differs = (a[:size] != b[:size]).any(1)
    return int(differs.argmax()) if differs.any() else size


def path_to(nodes: Sequence[Node], number: int) -> list[int]:
    """From a root to the node."""
    path = [number]
    while (parent := nodes[path[-1]].parent) >= 0:
        path.append(parent)
    return path[::-1]
