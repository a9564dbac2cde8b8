"""RoarGraph's fast build makes the graph of a plain one; its search finds what edges lead to.

Owns the plain one. Keys are small whole numbers: sums are exact, and both agree on every tie.
"""

from __future__ import annotations

import numpy as np
from native import load
from roargraph import Graph, roargraph_lists

LINKS, BEAM, LISTED = 4, 20, 12


class Plain:
    """The released code's steps, one key at a time, in Python."""

    def __init__(self, keys: np.ndarray, links: int) -> None:
        self.scores = keys @ keys.T  # larger is nearer
        self.links = links

    def ranked(self, pivot: int, ids: list[int]) -> list[int]:
        return sorted(ids, key=lambda key: (-self.scores[pivot, key], key))

    def prune(self, pivot: int, ids: list[int], *, fills: bool) -> list[int]:
        kept: list[int] = []
        for key in ids:
            near = self.scores[pivot, key]
            if len(kept) < self.links and all(self.scores[key, r] <= near for r in kept):
                kept.append(key)
        if fills:
            kept += [key for key in ids if key not in kept]
        return kept[: self.links]

    def add_reverse(self, lists: list[list[int]], key: int, room: int, *, fills: bool) -> None:
        for other in list(lists[key]):
            if key in lists[other]:
                continue
            lists[other].append(key)
            if len(lists[other]) > room:
                pool = self.ranked(other, lists[other])
                lists[other] = self.prune(other, pool, fills=fills)

    def project(self, near: np.ndarray) -> list[list[int]]:
        lists: list[list[int]] = [[] for _ in self.scores]
        for pivot, *others in near.tolist():
            lists[pivot] = self.prune(pivot, self.ranked(pivot, others), fills=True)
            self.add_reverse(lists, pivot, self.links, fills=True)
        for key in range(len(lists)):
            self.add_reverse(lists, key, self.links, fills=True)
        return lists

    def expanded(self, lists: list[list[int]], entry: int, target: int, beam: int) -> list[int]:
        queue, seen, done = [entry], {entry, target}, []
        while fresh := [key for key in queue if key not in done]:
            done.append(fresh[0])
            new = [key for key in lists[fresh[0]] if key not in seen]
            seen.update(new)
            queue = self.ranked(target, queue + new)[:beam]
        return [key for key in done if key != target]

    def beyond(self, known: list[int], key: int, pool: list[int]) -> list[int]:
        pool = self.ranked(key, pool)
        first = next((i for i, other in enumerate(pool) if other not in known), len(pool))
        return self.prune(key, pool[first:], fills=False)

    def build(self, near: np.ndarray, entry: int, beam: int) -> list[list[int]]:
        projected = self.project(near)
        supply = [list(row) for row in projected]
        for key, known in enumerate(projected):
            supply[key] = self.beyond(known, key, self.expanded(supply, entry, key, beam))
            self.add_reverse(supply, key, 2 * self.links, fills=False)
        for key, known in enumerate(projected):
            if len(supply[key]) > self.links:
                supply[key] = self.beyond(known, key, supply[key])
        pairs = zip(projected, supply, strict=True)
        return [known + [key for key in more if key not in known] for known, more in pairs]


def small_whole_numbers(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return keys (150, 8) and the neighbours (60, LISTED) of queries that prefer some of them."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-9, 10, (150, 8)).astype(np.float32)
    queries = rng.integers(-9, 10, (60, 8)) + 4
    near = np.argsort(-(queries @ keys.T), axis=1, kind="stable")[:, :LISTED]
    return keys, near.astype(np.uint32)


def test_the_graph_is_that_of_a_plain_build() -> None:
    for seed in range(3):
        keys, near = small_whole_numbers(seed)
        starts, ids = load("_roargraph").build(keys, near, LINKS, BEAM, 7)
        plain = Plain(keys, LINKS).build(near, 7, BEAM)
        assert [ids[starts[i] : starts[i + 1]].tolist() for i in range(len(keys))] == plain


def test_a_key_has_at_most_two_lists_of_links_all_distinct_and_none_to_itself() -> None:
    keys, near = small_whole_numbers(0)
    starts, ids = load("_roargraph").build(keys, near, LINKS, BEAM, 7)
    assert ids.max() < len(keys)
    for key in range(len(keys)):
        row = ids[starts[key] : starts[key + 1]]
        assert len(np.unique(row)) == len(row) <= 2 * LINKS
        assert key not in row


def test_the_padded_graph_says_the_same() -> None:
    keys, near = small_whole_numbers(0)
    graph = Graph(*roargraph_lists(keys, near), {})
    for key, row in enumerate(graph.padded()):
        own = graph.ids[graph.starts[key] : graph.starts[key + 1]]
        assert row[: len(own)].tolist() == own.tolist()
        assert set(row[len(own) :].tolist()) <= {key}


def test_a_search_whose_queue_holds_all_finds_the_best_of_all_that_edges_lead_to() -> None:
    keys, near = small_whole_numbers(1)
    starts, ids, entry = roargraph_lists(keys, near)
    reached, todo = {entry}, [entry]
    while todo:
        key = todo.pop()
        new = set(ids[starts[key] : starts[key + 1]].tolist()) - reached
        reached |= new
        todo += new
    queries = np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)
    stamps = np.zeros(len(keys), np.uint32)
    found, scored = load("_roargraph").search(
        keys, starts, ids, entry, queries, 10, len(keys), stamps, 1
    )
    assert scored == 3 * len(reached)
    for query, row in zip(queries, found, strict=True):
        assert row.tolist() == sorted(reached, key=lambda key: -(keys[key] @ query))[:10]
