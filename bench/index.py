"""Measure indexes on captured vectors: recall, keys scored, time, output error, per head.

    python bench/index.py --vectors FILE [--heads 0,1,…] [--indexes graph,scan,…] [--out FILE.json]

FILE is described in pairs.py. Our index, its plan and its lift are made exactly as an ingest makes
them, from training queries; the plan is tuned and the lift fitted on others of the training part.
Rivals are swept over their settings on the test queries themselves, in their favour (tuning.py):
`ivf` has at each head its fastest setting of recall ≥ 0.95, `ivf@shared` the fastest one setting
for all heads with a mean ≥ 0.95, `ivf+estimate` is `ivf` with our clusters for the keys not read;
`retroinfer@usual` has the width that its makers recommend, whatever its recall.

Times are medians over alternating rounds, the heads taken round robin and the caches emptied before
each round of them, so that keys come from memory; one thread; the queries of a group in one call.
`us_search` is the search alone and `us` the step (search, attend, estimate), both per query head;
`us_step` is the step of a KV head. `ratios[a][b]` is a's step over b's, the median over rounds.
`scored` counts keys touched, of ours the distinct ones of a KV head, of a library those of one
query head by its own counter, `centroids` those besides, both as shares of all tokens; errors are
relative L2 to exact attention over the middle, `error_plain` without an estimate. `bytes` are held
besides the KV cache. What does not apply is null. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import OURS, Contender, Ours, Rival
from numpy.typing import NDArray
from pairs import Pair, read_pairs
from paper import PAPERS
from retroinfer import CLUSTERS
from rivals import LIBRARIES
from roargraph import ROARGRAPHS
from tuning import Tuned, tune

RIVALS = {**LIBRARIES, **ROARGRAPHS, **CLUSTERS, **PAPERS}
ROUNDS = 5
CACHE_BYTES = 96 << 20  # read between rounds: more than a last-level cache holds
FIGURES = (
    "recall", "scored", "centroids", "us_search", "us", "us_step", "bytes", "build_s", "error",
    "error_plain",
)  # fmt: skip
Entered = dict[str, list[Contender]]  # by kind, one a head
Row = dict[str, Any]


def main() -> None:
    """Parse the arguments, measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--heads", help="comma-separated pair numbers; all without it")
    parser.add_argument(
        "--indexes", default="clusters,graph,scan", help=", ".join((*OURS, *RIVALS))
    )
    parser.add_argument("--queries", type=int, default=128, help="test queries per query head")
    parser.add_argument("--out", type=Path, help="also write the JSON here, per head too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [int(number) for number in arguments.heads.split(",")] if arguments.heads else None
    pairs = read_pairs(arguments.vectors, chosen=chosen, queries=arguments.queries)
    entered, sweeps = enter(arguments.indexes.split(","), pairs)
    rows, mean, ratios = measure_all(entered, pairs)
    print(
        f"{'head':>8} {'kind':>15} {'recall':>7} {'scored':>7} {'centr.':>7} {'us srch':>8}"
        f" {'us':>8} {'build s':>8} {'MB':>7} {'error':>7} {'plain':>7}"
    )
    for row in rows:
        print(line(row))
    for kind, row in mean.items():
        print(line({"head": "mean", "kind": kind, **row}))
    found = {"heads": rows, "mean": mean, "ratios": ratios, "sweeps": sweeps}
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"mean": mean}))


def enter(names: list[str], pairs: list[Pair]) -> tuple[Entered, dict[str, list[Row]]]:
    """Make the contenders of the kinds named, and say what the sweeps of rivals saw.

    Raises ValueError for a kind that does not exist.
    """
    tuned: dict[str, Tuned] = {}
    entered: Entered = {}
    for kind in names:
        rival, _, more = kind.partition("+")
        if kind in OURS:
            entered[kind] = [Ours(pair, kind) for pair in pairs]
            continue
        if rival not in RIVALS or more not in ("", "estimate"):
            raise ValueError(f"no index is called {kind!r}")
        if rival not in tuned:
            print(f"tuning {rival}", file=sys.stderr)
            tuned[rival] = tune(RIVALS[rival], pairs)
        own: list[Rival] = tuned[rival].own
        entered[kind] = [one.with_estimate() for one in own] if more else list(own)
        if not more and RIVALS[rival].widths:
            entered[f"{rival}@shared"] = list(tuned[rival].shared)
        if not more and tuned[rival].usual:
            entered[f"{rival}@usual"] = list(tuned[rival].usual)
    return entered, {name: described(one) for name, one in tuned.items()}


def described(tuned: Tuned) -> list[Row]:
    """Return what each setting of a sweep came to over the heads."""
    return [
        {
            "setting": tried.text,
            "recall": float(tried.recalls.mean()),
            "recall_worst": float(tried.recalls.min()),
            "us_search": float(tried.us.mean()),
        }
        for tried in tuned.sweep
    ]


def measure_all(
    entered: Entered, pairs: list[Pair]
) -> tuple[list[Row], dict[str, Row], dict[str, dict[str, float]]]:
    """Return a row per head and kind, the mean of each kind, and how their times compare."""
    kinds = list(entered)
    searching = {k: v for k, v in entered.items() if v[0].searches}
    us_search = dict(zip(searching, measure_times(searching, pairs, search_once), strict=True))
    rounds = dict(zip(kinds, measure_times(entered, pairs, step_once), strict=True))
    rows = []
    for number, pair in enumerate(pairs):
        for kind in kinds:
            us = float(np.median(rounds[kind][:, number]))
            alone = us_search.get(kind)
            times = {
                "us_search": None if alone is None else float(np.median(alone[:, number])),
                "us": us,
                "us_step": us * pair.group,
            }
            contender = entered[kind][number]
            rows.append({"head": pair.name, "kind": kind, **measure(pair, contender), **times})
    mean = {kind: mean_of([row for row in rows if row["kind"] == kind]) for kind in kinds}
    spent = {kind: rounds[kind].mean(axis=1) for kind in kinds}  # (ROUNDS,)
    ratios = {a: {b: float(np.median(spent[a] / spent[b])) for b in kinds} for a in kinds}
    return rows, mean, ratios


def mean_of(rows: list[Row]) -> Row:
    """Return the means over heads; a figure that one head lacks is null."""
    means: Row = {}
    for name in FIGURES:
        figures = [row[name] for row in rows]
        means[name] = None if None in figures else statistics.fmean(figures)
    means["recall_worst"] = min(row["recall"] for row in rows)
    return means


def measure(pair: Pair, contender: Contender) -> Row:
    """Return recall, shares scored and output errors of one head, means over its queries."""
    contender.prepare()
    recalls: list[float] = []
    scored, centroids = [], []
    errors: dict[bool, list[float]] = {True: [], False: []}
    for query in range(len(pair.tests)):
        if contender.searches:
            recalls.extend(pair.recalls(query, contender.search(pair.tests[query])).tolist())
        for estimate in {contender.estimates, False}:
            found = contender.step(pair.tests[query], estimate=estimate)
            errors[estimate].extend(pair.errors(query, found.out))
            if estimate == contender.estimates:
                scored.append(found.scored)
                centroids.append(found.centroids / pair.tokens)
    return {
        "recall": float(np.mean(recalls)) if recalls else 1.0,
        "scored": None if None in scored else float(np.mean(scored)) / pair.tokens,
        "centroids": float(np.mean(centroids)),
        "bytes": contender.size_bytes(),
        "build_s": contender.build_s,
        "setting": contender.setting,
        "error": float(np.mean(errors[True])) if contender.estimates else None,
        "error_plain": float(np.mean(errors[False])),
    }


def search_once(contender: Contender, queries: NDArray[np.float32]) -> None:
    """Do what `us_search` times."""
    contender.search(queries)


def step_once(contender: Contender, queries: NDArray[np.float32]) -> None:
    """Do what `us` times."""
    contender.step(queries, estimate=contender.estimates)


def measure_times(
    entered: Entered, pairs: list[Pair], do: Callable[[Contender, NDArray[np.float32]], None]
) -> list[NDArray[np.float64]]:
    """Return for each kind microseconds per query head, (ROUNDS, heads)."""
    spent = np.zeros((len(entered), ROUNDS, len(pairs)))
    count = len(pairs[0].tests)
    cache = np.zeros(CACHE_BYTES // 8)
    for turn in range(ROUNDS):
        asked = range(turn, count, ROUNDS)
        for kind_number, contenders in enumerate(entered.values()):
            for contender in contenders:
                contender.prepare()
            for query in asked:
                cache.sum()
                for number, (pair, contender) in enumerate(zip(pairs, contenders, strict=True)):
                    begin = time.perf_counter()
                    do(contender, pair.tests[query])
                    spent[kind_number, turn, number] += time.perf_counter() - begin
            spent[kind_number, turn] *= 1e6 / len(asked) / pairs[0].group
    return list(spent)


def line(row: Row) -> str:
    """Format one row of the table."""

    def number(name: str, width: int, digits: int, *, per: float = 1) -> str:
        value = row[name]
        return f" {'-':>{width}}" if value is None else f" {value / per:{width}.{digits}f}"

    return (
        f"{row['head']:>8} {row['kind']:>15}{number('recall', 7, 4)}{number('scored', 7, 4)}"
        f"{number('centroids', 7, 4)}{number('us_search', 8, 1)}{number('us', 8, 1)}"
        f"{number('build_s', 8, 2)}{number('bytes', 7, 2, per=1e6)}{number('error', 7, 4)}"
        f"{number('error_plain', 7, 4)} {row.get('setting', '')}"
    )


if __name__ == "__main__":
    sys.exit(main())
