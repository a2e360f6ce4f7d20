"""Texts whose memory is held, so that nothing is read twice: a tree of spans.

Every path from a root is the beginning of some text, and each node holds the span of its own
tokens. Texts with the same beginning share the nodes of it. Each set of weights has a tree of its
own, since memory that one computed is of no use to another. Together they hold a bounded number
of tokens: whatever was used least recently goes first, leaves before what they hang on. Every
node has its own storage, so what is forgotten is freed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loops_cookbook.local.sampling.spans import Span

Ids = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Node:
    """Some tokens after those of its parent."""

    ids: Ids
    span: Span | None
    """None: of a root, which has no tokens."""
    parent: "_Node | None"
    children: dict[int, "_Node"] = field(default_factory=dict[int, "_Node"])
    """By their first token."""


class Prefixes:
    """Every span that is held.

    Args:
        most_tokens: that all of them may have together; 0 holds nothing.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._roots: dict[str, _Node] = {}
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        """The least recently used first. A parent is used whenever a child of it is, and counts
        as used after it, so the first one is always a leaf."""
        self.tokens = 0
        """Held now."""

    def find(self, weights: str, ids: Sequence[int]) -> list[Span]:
        """The spans of the longest beginning of a text that is held, in order; none where none is.

        Args:
            weights: whose memory.
            ids: the text, or as much of it as may be found.
        """
        text = np.asarray(ids, np.int64)
        path = self._path(weights, text)
        if path:
            self._use(path[-1][0])
        return [node.span.part(0, shared) for node, shared in path if node.span is not None]

    def hold(self, weights: str, ids: Sequence[int], span: Span) -> None:
        """Hold the memory of a text's end. What is held of it already stays as it is.

        Nothing is held of a text that is too long, or whose beginning, which the span goes on
        from, is not held.

        Args:
            weights: that computed it.
            ids: the whole text.
            span: of its last tokens.
        """
        text = np.asarray(ids, np.int64)
        root = self._roots.setdefault(weights, _Node(text[:0], None, None))
        path = self._path(weights, text)
        node, shared = path[-1] if path else (root, 0)
        self._use(node)
        depth = sum(shared for _, shared in path)
        start, missing = len(text) - len(span), len(text) - depth
        if depth < start or missing == 0 or len(text) > self._most_tokens:
            return
        if shared < len(node.ids):
            node = self._split(node, shared)
        # The beginning was used just now, so it goes last, and both together fit.
        self._make_room(missing)
        leaf = _Node(text[depth:], span.part(depth - start, len(span)).copied(), node)
        node.children[int(text[depth])] = leaf
        self.tokens += missing
        self._use(leaf)

    def forget(self, weights: str) -> None:
        """Let go of all that these weights computed."""
        waiting = [self._roots.pop(weights)] if weights in self._roots else []
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            self._nodes.pop(node, None)
            self.tokens -= len(node.ids)

    def forget_all(self) -> None:
        """Let go of everything."""
        for weights in list(self._roots):
            self.forget(weights)

    def _path(self, weights: str, text: Ids) -> list[tuple[_Node, int]]:
        """Nodes along a text, and how many of its tokens each has; only the last may have fewer
        than it could."""
        path: list[tuple[_Node, int]] = []
        node = self._roots.get(weights)
        depth = shared = 0
        while node is not None and shared == len(node.ids) and depth < len(text):
            node = node.children.get(int(text[depth]))
            if node is not None:
                length = min(len(node.ids), len(text) - depth)
                differs = node.ids[:length] != text[depth : depth + length]
                shared = int(differs.argmax()) if differs.any() else length
                path.append((node, shared))
                depth += shared
        return path

    def _use(self, node: _Node | None) -> None:
        while node is not None and node.span is not None:
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            node = node.parent

    def _split(self, node: _Node, at: int) -> _Node:
        """Part a node in two; the first of them."""
        assert node.span is not None
        assert node.parent is not None
        upper = _Node(node.ids[:at], node.span.part(0, at).copied(), node.parent)
        node.parent.children[int(node.ids[0])] = upper
        upper.children[int(node.ids[at])] = node
        node.ids, node.span = node.ids[at:], node.span.part(at, len(node.span)).copied()
        node.parent = upper
        self._use(upper)
        return upper

    def _make_room(self, tokens: int) -> None:
        while self.tokens + tokens > self._most_tokens:
            node, _ = self._nodes.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[int(node.ids[0])]
            self.tokens -= len(node.ids)
