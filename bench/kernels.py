"""Measure the ways to score int8 keys against each other, on this processor.

    python bench/kernels.py [--keys N] [--out FILE.json]

Random keys of 64 channels, three query heads that share them, one thread; rounds alternate between
the ways. The last line is one JSON object: nanoseconds a key, and how many times faster than the
portable loop each way is (medians).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from openbook.indexstore import _search

ROUNDS = 15
WIDTH, HEADS = 64, 3


def main() -> None:
    """Parse the arguments, measure, print and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keys", type=int, default=32_128)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.integers(-127, 128, (arguments.keys, WIDTH)).astype(np.int8)
    queries = rng.integers(-20_000, 20_001, (HEADS, WIDTH)).astype(np.int16)
    ids = np.arange(arguments.keys, dtype=np.uint32)
    spent: dict[str, list[float]] = {level: [] for level in _search.levels()}
    for _ in range(ROUNDS):
        for level, times in spent.items():
            begin = time.perf_counter()
            _search.score_int8(queries, keys, ids, level)
            times.append((time.perf_counter() - begin) * 1e9 / arguments.keys)
    portable = spent["portable"]
    found = {
        level: {
            "ns_per_key": round(statistics.median(times), 2),
            "times_portable": round(
                statistics.median(p / t for p, t in zip(portable, times, strict=True)), 2
            ),
        }
        for level, times in spent.items()
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
