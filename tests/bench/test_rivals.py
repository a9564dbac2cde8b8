"""Every rival of the benchmark finds keys that exist, all of them when told to look at all.

Owns what is true of rivals whatever their figures are; the figures are bench/index.py's.
"""

from __future__ import annotations

import numpy as np
import pytest
from contenders import Index
from index import RIVALS
from pairs import KEYS, Pair
from tuning import Setting, best, tune

LIBRARY_OF = dict.fromkeys(("flat", "ivf", "ivfpq", "ivfsq", "hnsw"), "faiss")
LIBRARY_OF |= {"hnswlib": "hnswlib", "usearch": "usearch"}
READ_ALL = {"flat": None, "ivf": 10**6, "retroinfer": 10**6}  # at this width
NEARLY_ALL = {  # a graph's widest search may miss a key that no edge leads to
    "ivfpq": 10**6, "ivfsq": 10**6, "hnsw": KEYS * 20, "hnswlib": KEYS * 20, "usearch": KEYS * 20,
    "roargraph": KEYS * 20, "roargraph-int8": KEYS * 20, "paper": KEYS * 20,
    "robustvamana": KEYS * 20, "ours": KEYS * 20, "ours-own": KEYS * 20, "ours-raw": KEYS * 20,
    "ours-own-raw": KEYS * 20, "ours-clusters": 1000,
}  # fmt: skip


def built(kind: str, pair: Pair) -> Index:
    """Build the last variant of a kind, or skip the test where its library is not installed."""
    if kind in LIBRARY_OF:
        pytest.importorskip(LIBRARY_OF[kind])
    index: Index = RIVALS[kind](**RIVALS[kind].variants[-1])
    index.build(pair.wide, pair.training)
    return index


def recall(index: Index, pair: Pair) -> float:
    return float(
        np.mean([pair.recalls(number, index.search(q)) for number, q in enumerate(pair.tests)])
    )


def test_every_rival_is_judged() -> None:
    assert set(RIVALS) == set(READ_ALL) | set(NEARLY_ALL)


@pytest.mark.parametrize("kind", RIVALS)
def test_rival_finds_distinct_keys_that_exist(kind: str, pairs: list[Pair]) -> None:
    index = built(kind, pairs[0])
    if index.widths:
        index.widen(index.widths[0])
    ids = index.search(pairs[0].tests[0])
    assert ids.shape[0] == pairs[0].group
    for row in ids:
        found = row[row >= 0]
        assert len(np.unique(found)) == len(found) > 0
        assert found.max() < len(pairs[0].wide)
    scored, centroids = index.counted()
    assert scored is None or 0 < scored <= len(pairs[0].wide) * pairs[0].group
    assert centroids >= 0
    assert index.size_bytes() > 0


@pytest.mark.parametrize("kind", READ_ALL)
def test_rival_told_to_read_all_finds_all(kind: str, pairs: list[Pair]) -> None:
    index = built(kind, pairs[0])
    if (width := READ_ALL[kind]) is not None:
        index.widen(width)
    assert recall(index, pairs[0]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", NEARLY_ALL)
def test_rival_told_to_look_everywhere_finds_nearly_all(kind: str, pairs: list[Pair]) -> None:
    index = built(kind, pairs[0])
    index.widen(index.widths[0])
    narrow = recall(index, pairs[0])
    index.widen(NEARLY_ALL[kind])
    assert recall(index, pairs[0]) >= max(0.95, narrow)


def setting(variant: int, recalls: list[float], us: list[float]) -> Setting:
    return Setting(variant, None, "", np.array(recalls), np.array(us))


def test_the_fastest_setting_that_finds_enough_is_chosen_else_the_one_that_finds_most() -> None:
    poor = setting(0, [0.90, 0.94], [1, 1])
    enough = setting(0, [0.94, 0.98], [2, 3])
    wide = setting(0, [0.96, 0.99], [3, 1])  # faster than a narrower one by chance
    other = setting(1, [0.97, 0.97], [9, 2])
    sweep = [poor, enough, wide, other]
    assert best(sweep, [0]) is wide
    assert best(sweep, [1]) is other
    assert best(sweep, [0, 1]) is enough
    assert best([poor, setting(1, [0.5, 0.5], [0, 0])], [0, 1]) is poor


def test_a_sweep_gives_each_head_its_own_setting_and_all_heads_one(pairs: list[Pair]) -> None:
    tuned = tune(RIVALS["retroinfer"], pairs)
    assert len(tuned.own) == len(tuned.shared) == len(tuned.usual) == len(pairs)
    for head, own in enumerate(tuned.own):
        reaching = [tried for tried in tuned.sweep if tried.recalls[head] >= 0.95]
        assert own.setting in [tried.text for tried in reaching]
    assert len({shared.setting for shared in tuned.shared}) == 1
