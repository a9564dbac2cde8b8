"""RobustVamana's fast build makes the lists of a plain one.

Owns the plain one. Points are small whole numbers: sums are exact, and both agree on every tie.
"""

from __future__ import annotations

import numpy as np
import pytest
from native import load

LINKS, BEAM, LISTED = 5, 15, 6


class Plain:
    """The paper's steps, one node at a time, in Python: the first `keys` nodes are keys."""

    def __init__(self, points: np.ndarray, keys: int) -> None:
        self.gaps = ((points[:, None] - points[None]) ** 2).sum(axis=2)  # squared L2
        self.lists: list[list[int]] = [[] for _ in points]
        self.keys = keys

    def ranked(self, pivot: int, ids: list[int]) -> list[int]:
        return sorted(ids, key=lambda node: (self.gaps[pivot, node], node))

    def choose(self, pivot: int, ids: set[int], alpha: np.float32) -> None:
        kept: list[int] = []
        for node in self.ranked(pivot, list(ids - {pivot})):
            gap = self.gaps[pivot, node]
            if len(kept) < LINKS and all(alpha * self.gaps[node, r] > gap for r in kept):
                kept.append(node)
        self.lists[pivot] = kept

    def expanded(self, entry: int, target: int) -> set[int]:
        queue, seen, done = [entry], {entry}, set()
        while fresh := [node for node in queue if node not in done]:
            done.add(fresh[0])
            new = [node for node in self.lists[fresh[0]] if node not in seen]
            seen.update(new)
            queue = self.ranked(target, queue + new)[:BEAM]
        return done

    def insert(self, node: int, entry: int, known: np.ndarray, alpha: np.float32) -> None:
        pool = self.expanded(entry, node) | set(self.lists[node])
        if node >= self.keys:
            pool |= set(known[node - self.keys].tolist())
        self.choose(node, pool, alpha)
        for other in self.lists[node]:
            if node not in self.lists[other]:
                self.lists[other].append(node)
                if len(self.lists[other]) > LINKS:
                    self.choose(other, set(self.lists[other]), alpha)

    def stitch(self, alpha: np.float32) -> None:
        for key in range(self.keys):
            queries = [node for node in self.lists[key] if node >= self.keys]
            if queries:
                pool = set(self.lists[key]).union(*(self.lists[query] for query in queries))
                self.choose(key, {node for node in pool if node < self.keys}, alpha)


@pytest.mark.parametrize("alpha", [1.0, 1.2])
def test_the_lists_are_those_of_a_plain_build(alpha: float) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        points = rng.integers(-9, 10, (180, 6)).astype(np.float32)
        keys = 130
        plain = Plain(points, keys)
        known = np.argsort(plain.gaps[keys:, :keys], axis=1, kind="stable")[:, :LISTED]
        ids, sizes, entry = load("_vamana").build(
            points, known.astype(np.uint32), LINKS, BEAM, alpha
        )
        order = np.random.default_rng(0).permutation(len(points))
        for rule in (np.float32(1), np.float32(alpha)):
            for node in order.tolist():
                plain.insert(node, entry, known, rule)
        plain.stitch(np.float32(alpha))
        found = [row[:size].tolist() for row, size in zip(ids, sizes, strict=True)]
        assert found == plain.lists[:keys]
        assert sum(sizes) > keys
