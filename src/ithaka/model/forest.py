"""A forest of token sequences: common prefixes are nodes that several sequences go through."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_TOKENS = 128  # sharing fewer saves less than the attention calls for another node cost


class Node(NamedTuple):
    """Rows [start, stop) of a sequence, shared by all sequences that go through this node."""

    sequence: int
    start: int
    stop: int
    parent: int  # index of a node, or -1


def build_forest(rows: Sequence[np.ndarray], min_tokens: int) -> tuple[list[Node], list[int]]:
    """Return the nodes of a forest of the sequences `rows`, [tokens, ...] each, and the node in which each one ends.
    Common prefixes of fewer than `min_tokens` are not shared.

    Parents come before children, and the largest subtree comes first, so that attention treats long paths as one
    document and batches answers of equal length.
    """
    nodes: list[list[int]] = []  # as Node, in order of creation
    children: dict[tuple[int, bytes], list[int]] = defaultdict(list)  # by parent and first row
    ends = list[int]()
    for number, own in enumerate(rows):
        at, parent = 0, -1
        while at < len(own):
            siblings = children[parent, own[at].tobytes()]
            for child in siblings:
                sequence, start, stop, _ = nodes[child]
                num_equal = count_equal(own[at:], rows[sequence][start:stop], min_tokens)
                if num_equal >= min(min_tokens, stop - start):
                    break
            else:
                siblings.append(len(nodes))
                nodes.append([number, at, len(own), parent])
                parent = siblings[-1]
                break
            if start + num_equal < stop:  # split it: the upper part keeps its index, so that earlier ends move down
                lower = len(nodes)
                nodes.append([sequence, start + num_equal, stop, child])
                nodes[child][2] = start + num_equal
                for key in [key for key in children if key[0] == child]:
                    children[lower, key[1]] = children.pop(key)
                    for grandchild in children[lower, key[1]]:
                        nodes[grandchild][3] = lower
                children[child, rows[sequence][start + num_equal].tobytes()].append(lower)
                ends = [lower if end == child else end for end in ends]
            parent, at = child, at + num_equal
        ends.append(parent)
    return _sort_nodes(nodes, ends)


def _sort_nodes(nodes: list[list[int]], ends: list[int]) -> tuple[list[Node], list[int]]:
    children, sizes = defaultdict[int, list[int]](list), [stop - start for _, start, stop, _ in nodes]
    for number, (*_, parent) in enumerate(nodes):
        children[parent].append(number)
    top_down = list(children[-1])
    for number in top_down:
        top_down += children[number]
    for number in reversed(top_down):
        sizes[number] += sum(sizes[child] for child in children[number])
    order, stack = list[int](), sorted(children[-1], key=sizes.__getitem__)
    while stack:
        order.append(stack.pop())
        stack += sorted(children[order[-1]], key=sizes.__getitem__)
    places = {old: new for new, old in enumerate(order)} | {-1: -1}
    return [Node(*nodes[old])._replace(parent=places[nodes[old][3]]) for old in order], [places[end] for end in ends]


def count_equal(a: np.ndarray, b: np.ndarray, min_tokens: int) -> int:
    """Count equal leading rows. Compares `min_tokens` rows first, because most sequences differ early."""
    for size in (min_tokens, min(len(a), len(b))):
        size = min(size, len(a), len(b))
        differs = (a[:size] != b[:size]).any(1)
        if differs.any():
            return int(differs.argmax())
    return size


def path_to(nodes: Sequence[Node], number: int) -> list[int]:
    """From a root to the node."""
    path = [number]
    while (parent := nodes[path[-1]].parent) >= 0:
        path.append(parent)
    return path[::-1]
