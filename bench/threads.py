"""Compare what a layer's step takes in one thread and in several.

    python bench/threads.py --vectors FILE [--threads 2] [--queries 60] [--out FILE.json]

The KV heads of FILE (pairs.py) stand for a layer; one call attends for all of them, as a step of
decoding does. Heads taken in turn do not stay in the caches; rounds alternate between the numbers
of threads. The last line is one JSON object: microseconds a call and their ratio, medians over
rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pairs import Pair, read_pairs

from openbook.indexstore.attend import attend
from openbook.indexstore.head import AttendRequest, Budget, LayerIndex

ROUNDS = 7


def requests_of(pairs: list[Pair]) -> list[AttendRequest]:
    """Return a request for every test query, of all heads together."""
    layer = LayerIndex(
        tuple(pair.head for pair in pairs), tuple(pair.plans["clusters"] for pair in pairs)
    )
    tests = zip(*(pair.tests for pair in pairs), strict=True)  # a tuple of (G, d), one a head
    return [
        AttendRequest(layer, np.concatenate(asked)[:, None], pairs[0].scaling, Budget())
        for asked in tests
    ]


def spent(requests: list[AttendRequest], threads: int) -> float:
    """Return microseconds a request."""
    begin = time.perf_counter()
    for request in requests:
        attend([request], threads=threads)
    return (time.perf_counter() - begin) / len(requests) * 1e6


def measure(requests: list[AttendRequest], threads: int) -> NDArray[np.float64]:
    """Return microseconds a request in one thread and in `threads`, (2, ROUNDS)."""
    attend([requests[0]], threads=threads)  # the pool is started
    rounds = [[spent(requests, n) for n in (1, threads)] for _ in range(ROUNDS)]
    return np.array(rounds).T


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--queries", type=int, default=60, help="test queries per query head")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    requests = requests_of(read_pairs(arguments.vectors, chosen=None, queries=arguments.queries))
    one, several = measure(requests, arguments.threads)
    result = {
        "heads": len(requests[0].layer.heads),
        "threads": arguments.threads,
        "us_one": float(np.median(one)),
        "us_several": float(np.median(several)),
        "ratio": float(np.median(one / several)),
        "ratios": (one / several).tolist(),
    }
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
