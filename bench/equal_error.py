"""Compare what a step takes with the error of its output, at many settings of each index.

    python bench/equal_error.py --vectors FILE [--heads 0,1,…] [--queries 64] [--out FILE.json]

A step is search, attention and estimate of a layer, for which the KV heads of FILE stand; its error
is the relative L2 distance to exact attention over the middle. Ours takes all heads in one call, as
decoding does; a rival's heads follow one another. Caches are emptied before each step. Ours is
asked for more or fewer keys by the plan of its ingest, no test query having a say; every rival is
swept over its widths and, where it drops the keys it does not read, over how many it reads.
`at_error[e][kind]` is what a kind's step takes over ours at an error of e, each between the two
settings that lie around it on its own frontier, by the logarithms of both; the exact scan has no
error and stands as it is. Null: no setting gets there. `clusters/head` is ours with a call for each
head, as rivals have. `keys_read` are those of a KV head, null of rivals. Medians over alternating
rounds of the ratio in each. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import Contender, Ids, Ours, Rival
from index import CACHE_BYTES, ROUNDS, Entered, measure
from numpy.typing import NDArray
from pairs import Floats, Pair, read_pairs
from retroinfer import RetroInfer
from rivals import Flat, Ivf
from tuning import build

from openbook.indexstore.head import Budget

OUR_KEYS = (16, 32, 64, 100, 150, 200, 300)
PLAIN_KEYS = (100, 400)  # ours without the estimate
READ_KEYS = (100, 200, 400, 800, 1600)  # of a rival that drops the rest
IVF_WIDTHS = (8, 16, 32, 64)
RETRO_WIDTHS = (4, 8, 12, 16, 24, 36, 48, 64, 96, 128, 192, 256, 384)
ANCHORS = (
    "clusters 32",
    "clusters 64",
    "clusters 100",
    "clusters 200",
)  # whose errors are compared at
Curve = list[tuple[float, float]]  # (error, microseconds)


class OursOf(Ours):
    """Our default kind with another number of keys, with or without the estimate."""

    def __init__(self, pair: Pair, keys: int, *, estimates: bool, by_layer: bool = True) -> None:
        super().__init__(pair, "clusters")
        self.by_layer = by_layer
        self._budget, self.estimates = Budget(keys=keys), estimates
        self.searches = False  # what its recall is of fewer keys is nobody's question here


@dataclass
class Reading:
    """An index of faiss that is asked for `keys` of each query head."""

    index: Flat
    keys: int
    shares = True

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, keys)."""
        return self.index.ids(queries, self.keys)

    def widen(self, width: int) -> None:
        """Set how much of the index a search looks at."""
        self.index.widen(width)

    def counted(self) -> tuple[float | None, float]:
        """Nothing is counted: time and error are what is asked."""
        return None, 0.0

    def size_bytes(self) -> int:
        """Return the bytes of the index."""
        return self.index.size_bytes()


def enter(pairs: list[Pair]) -> dict[str, list[Contender]]:
    """Return every setting of every kind, one contender a head, by "kind setting"."""
    entered: dict[str, list[Contender]] = {"exact": [Ours(pair, "exact") for pair in pairs]}
    for keys in OUR_KEYS:
        entered[f"clusters {keys}"] = [OursOf(pair, keys, estimates=True) for pair in pairs]
        entered[f"clusters/head {keys}"] = [
            OursOf(pair, keys, estimates=True, by_layer=False) for pair in pairs
        ]
    for keys in PLAIN_KEYS:
        entered[f"plain {keys}"] = [OursOf(pair, keys, estimates=False) for pair in pairs]
    retro = [build(RetroInfer, {}, pair)[0] for pair in pairs]
    for width in RETRO_WIDTHS:
        entered[f"retroinfer {width}"] = [
            RetroInfer.contender(pair, index, width=width, setting="", build_s=0.0)
            for pair, index in zip(pairs, retro, strict=True)
        ]
    flat = [build(Flat, {}, pair)[0] for pair in pairs]
    lists = 512 if pairs[0].tokens < 65_536 else 1024
    ivf = [build(Ivf, {"lists": lists}, pair)[0] for pair in pairs]
    for keys in READ_KEYS:
        entered[f"flat {keys}"] = read(pairs, flat, keys, width=None, estimates=False)
        for width in IVF_WIDTHS:
            name = f"{keys} of {width} lists"
            entered[f"ivf {name}"] = read(pairs, ivf, keys, width=width, estimates=False)
            if keys <= 200:
                entered[f"ivf+estimate {name}"] = read(
                    pairs, ivf, keys, width=width, estimates=True
                )
    return entered


def read(
    pairs: list[Pair], indexes: Sequence[Any], keys: int, *, width: int | None, estimates: bool
) -> list[Contender]:
    """Return a rival that reads so many keys, for every head."""
    return [
        Rival(pair, Reading(index, keys), width=width, setting="", build_s=0.0, estimates=estimates)
        for pair, index in zip(pairs, indexes, strict=True)
    ]


def measure_layers(entered: Entered, pairs: list[Pair]) -> NDArray[np.float64]:
    """Return microseconds per query head of each kind's step of a layer, (kinds, ROUNDS)."""
    spent = np.zeros((len(entered), ROUNDS))
    tests = np.stack([pair.tests for pair in pairs], axis=1)  # (t, H, G, d)
    _, heads, group, _ = tests.shape
    cache = np.zeros(CACHE_BYTES // 8)
    for turn in range(ROUNDS):
        asked = tests[turn::ROUNDS]
        for number, contenders in enumerate(entered.values()):
            for contender in contenders:
                contender.prepare()
            step = stepper(contenders)
            for queries in asked:
                cache.sum()
                begin = time.perf_counter()
                step(queries)
                spent[number, turn] += time.perf_counter() - begin
            spent[number, turn] *= 1e6 / (len(asked) * heads * group)
    return spent


def stepper(contenders: Sequence[Contender]) -> Callable[[Floats], object]:
    """Return what does one step of all KV heads: queries (H, G, d)."""
    ours = [one for one in contenders if isinstance(one, Ours) and one.by_layer]
    if ours:
        return Ours.as_layer(ours)

    def step(queries: Floats) -> None:
        for contender, mine in zip(contenders, queries, strict=True):
            contender.step(mine, estimate=contender.estimates)

    return step


def keys_read(contenders: Sequence[Contender]) -> float | None:
    """Return the distinct keys that a step of a KV head reads, in the mean; None of rivals."""
    ours = [one.keys_read for one in contenders if isinstance(one, Ours)]
    return float(np.mean(ours)) if ours else None


def frontier(points: Curve) -> Curve:
    """Return the points that none is better than in both error and time, errors rising."""
    kept: Curve = []
    for error, us in sorted(points):
        if not kept or us < kept[-1][1]:
            kept.append((error, us))
    return kept


def time_at(points: Curve, error: float) -> float | None:
    """Return what a kind takes at an error, None if no setting of it gets as low."""
    best = frontier(points)
    if not best or best[0][0] > error:
        return None
    errors, us = np.log(np.maximum(np.array(best), 1e-12)).T
    return float(np.exp(np.interp(np.log(error), errors, us)))


def compare(
    names: list[str], errors: NDArray[np.float64], us: NDArray[np.float64]
) -> dict[str, dict[str, float | None]]:
    """Return time over ours of every kind at our anchors' errors: medians over rounds.

    `errors` (settings,) and `us` (settings, rounds).
    """
    kinds = sorted({name.split()[0] for name in names})
    found: dict[str, dict[str, float | None]] = {}
    for anchor in ANCHORS:
        error = float(errors[names.index(anchor)])
        ratios: dict[str, float | None] = {"error": error}
        for kind in kinds:
            mine = [n for n, name in enumerate(names) if name.split()[0] == kind]
            times = [
                time_at([(errors[n], us[n, turn]) for n in mine], error)
                for turn in range(us.shape[1])
            ]
            ours = us[names.index(anchor)]
            ratios[kind] = None
            if None not in times:
                ratios[kind] = float(np.median(np.array(times, float) / ours))
        found[anchor] = ratios
    return found


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--heads", help="comma-separated pair numbers; all without it")
    parser.add_argument("--queries", type=int, default=64, help="test queries per query head")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    if arguments.queries < ROUNDS:
        parser.error(f"--queries is at least {ROUNDS}")
    torch.set_num_threads(1)
    chosen = [int(number) for number in arguments.heads.split(",")] if arguments.heads else None
    pairs = read_pairs(arguments.vectors, chosen=chosen, queries=arguments.queries)
    entered = enter(pairs)
    names = list(entered)
    spent = measure_layers(entered, pairs)
    errors = np.zeros(len(names))
    steps: dict[str, dict[str, float | None]] = {}
    for number, contenders in enumerate(entered.values()):
        rows = [measure(pair, one) for pair, one in zip(pairs, contenders, strict=True)]
        errors[number] = np.mean(
            [row["error_plain"] if row["error"] is None else row["error"] for row in rows]
        )
        us, read = float(np.median(spent[number])), keys_read(contenders)
        steps[names[number]] = {"error": float(errors[number]), "us": us, "keys_read": read}
        shown = "-" if read is None else f"{read:.1f}"
        print(f"{names[number]:>32} {errors[number]:8.4f} {us:8.1f} us {shown:>7} keys read")
    result = {"heads": len(pairs), "steps": steps, "at_error": compare(names, errors, spent)}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"at_error": result["at_error"]}))


if __name__ == "__main__":
    sys.exit(main())
