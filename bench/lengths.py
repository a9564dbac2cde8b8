"""Measure our own kinds against the number of tokens: time, build and bytes, and where they cross.

    python bench/lengths.py --vectors FILE [--heads 0,1] [--tokens 8192,16384,…] [--out FILE.json]

The first so many tokens of FILE (pairs.py) stand for a document of that length; its queries are
those of the training part that no index was trained on, turned to where decoding would happen, and
tune the plans. Columns as in index.py. `crossover` is the least of the lengths from which on
`clusters` takes less for a step than another kind; null if it never does. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import Ours
from index import line, measure_all
from pairs import Pair, exact_answers, read_pair, training_queries

KINDS = ("clusters", "graph", "scan", "exact")


class Cut:
    """The first `tokens` tokens of a file of vectors."""

    def __init__(self, vectors: Any, tokens: int) -> None:
        self._vectors, self._tokens = vectors, tokens

    def __getitem__(self, name: str) -> Any:
        """Return an array of the file, or one for each query head, without what comes later."""
        whole = self._vectors[name]
        if name.startswith(("keys", "values")):
            return whole[: self._tokens]
        if name.startswith("train_"):
            positions = self._vectors[name.replace("queries", "positions")]
            return [row[at < self._tokens] for row, at in zip(whole, positions, strict=True)]
        return whole


def read_cut(vectors: Any, number: int, tokens: int) -> Pair:
    """Index one pair cut to its first tokens, to be asked by queries that trained nothing."""
    info = json.loads(str(vectors["info"])) | {"tokens": tokens}
    cut = Cut(vectors, tokens)
    pair = read_pair(cut, info, number, 1)
    _, spare = training_queries(cut, info, number)
    pair.tests = np.ascontiguousarray(np.moveaxis(spare.numpy(), 0, 1))  # (p, G, d)
    pair.bars, pair.exact_out = exact_answers(pair.tests, pair.head, pair.scaling)
    return pair


def crossovers(means: dict[int, dict[str, dict[str, Any]]]) -> dict[str, int | None]:
    """Return the least length from which on a step by clusters takes less than another kind's."""
    found: dict[str, int | None] = {}
    for kind in KINDS[1:]:
        found[kind] = None
        for tokens in sorted(means, reverse=True):
            if means[tokens]["clusters"]["us"] >= means[tokens][kind]["us"]:
                break
            found[kind] = tokens
    return found


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--heads", default="0", help="comma-separated pair numbers")
    parser.add_argument("--tokens", default="8192,16384,32768,65536,131072")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    means: dict[int, dict[str, dict[str, Any]]] = {}
    with np.load(arguments.vectors) as vectors:
        for tokens in map(int, arguments.tokens.split(",")):
            heads = map(int, arguments.heads.split(","))
            pairs = [read_cut(vectors, number, tokens) for number in heads]
            entered = {kind: [Ours(pair, kind) for pair in pairs] for kind in KINDS}
            _, means[tokens], _ = measure_all(entered, pairs)
            for kind, row in means[tokens].items():
                print(line({"head": str(tokens), "kind": kind, **row}))
    result = {"lengths": means, "crossover": crossovers(means)}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"crossover": result["crossover"]}))


if __name__ == "__main__":
    sys.exit(main())
