"""Draw the paper's figures of the index from captured vectors: 3a, 3b and 6.

    python bench/paper_index.py --vectors FILE [--heads 0,1,…] [--folder docs/figures]

Recall@100 against the share of keys scored per query, once for queries (`q_to_k`: what decoding
asks) and once for keys as queries (`k_to_k`), for each index that counts what it scores, at rising
widths. Centroids are drawn as scored, and so are keys of which only the 4-bit codes are read; the
JSON has centroids apart. A query is asked alone, as in the
paper, so that a group shares nothing; the paper's graphs per query head are trained on their own
head's queries. Then the Mahalanobis distance of queries and of keys to the keys' distribution.
Means over the heads of the file, FILE as in pairs.py. Writes paper_index.json and paper_index.png,
and prints the curves. Figure 2, which needs a model that generates, is drawn by recovery.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from contenders import Index
from index import RIVALS
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray
from pairs import Pair, Training, exact_answers, read_pairs

# The index, its variant for the figure, and how it is drawn.
DRAWN: dict[str, tuple[dict[str, Any], str, str]] = {
    "ivf": ({"lists": 512}, "IVF (faiss)", "#8a8f98"),
    "hnsw": ({"links": 32, "metric": "ip"}, "HNSW (faiss)", "#c0392b"),
    "robustvamana": ({}, "RobustVamana", "#d68910"),
    "paper-one": ({"centred": True}, "the paper: RoarGraph per query head", "#7d3c98"),
    "roargraph": ({"centred": True}, "RoarGraph, our training queries", "#c39bd3"),
    "retroinfer": ({}, "RetroInfer-like clusters", "#27ae60"),
    "ours": ({}, "openbook graph", "#7fb3d5"),
    "ours-clusters": ({}, "openbook clusters and codes", "#1f6f8b"),
}
ENOUGH = 0.995  # wider settings are not asked
KEY_QUERIES = 256  # keys that are asked for, of each head
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 60


def main() -> None:
    """Parse the arguments, measure, draw, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--heads", help="comma-separated pair numbers; all without it")
    parser.add_argument("--queries", type=int, default=64, help="test queries per query head")
    parser.add_argument("--folder", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    chosen = [int(number) for number in arguments.heads.split(",")] if arguments.heads else None
    pairs = read_pairs(arguments.vectors, chosen=chosen, queries=arguments.queries)
    asked = {"q_to_k": pairs, "k_to_k": [asking_keys(pair) for pair in pairs]}
    found = {
        "tokens": pairs[0].tokens,
        "heads": [pair.name for pair in pairs],
        "curves": {way: curves(ours, way) for way, ours in asked.items()},
        "mahalanobis": mahalanobis(pairs),
    }
    (arguments.folder / "paper_index.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, arguments.folder / "paper_index.png")
    print(json.dumps(found["curves"]))


def asking_keys(pair: Pair) -> Pair:
    """Return the head with keys of it for tests, (KEY_QUERIES, 1, d)."""
    rng = np.random.default_rng(0)
    tests = pair.wide[np.sort(rng.choice(len(pair.wide), KEY_QUERIES, replace=False)), None]
    bars, out = exact_answers(tests, pair.head, pair.scaling)
    return replace(pair, tests=np.ascontiguousarray(tests), bars=bars, exact_out=out)


def curves(pairs: Sequence[Pair], way: str) -> dict[str, list[dict[str, float]]]:
    """Return for each index its points: width, recall and share scored, means over heads."""
    found = {}
    for kind, (variant, label, _) in DRAWN.items():
        if kind == "paper-one" and way == "k_to_k":
            continue  # a key belongs to no query head
        print(way, label, file=sys.stderr)
        built = [indexes(kind, variant, pair) for pair in pairs]
        points: list[dict[str, float]] = []
        for width in built[0][0].widths:
            figures = [
                ask_alone(mine, pair, width) for mine, pair in zip(built, pairs, strict=True)
            ]
            recall, scored, centroids = np.mean(figures, axis=0).tolist()
            points.append(
                {"width": width, "recall": recall, "scored": scored, "centroids": centroids}
            )
            if recall >= ENOUGH:
                break
        found[kind] = points
    return found


def indexes(kind: str, variant: dict[str, Any], pair: Pair) -> list[Index]:
    """Build the index that each query head of a pair asks: one for all, or the paper's several."""
    group = pair.group
    if kind != "paper-one":
        index: Index = RIVALS[kind](**variant)
        index.build(pair.wide, pair.training)
        return [index] * group
    built = []
    for queries in pair.training.all_raw:
        built.append(RIVALS["roargraph"](**variant))
        built[-1].build(pair.wide, Training((queries,), (queries,), (queries,)))
    return built


def ask_alone(built: list[Index], pair: Pair, width: int) -> tuple[float, float, float]:
    """Return recall, the share of keys scored, and centroids besides, each query asked alone."""
    recalls, scored, means = [], [], []
    for index in built:
        index.widen(width)
    for number, tests in enumerate(pair.tests):
        for head, index in enumerate(built):
            ids = index.search(tests[head : head + 1])
            recalls.append(pair.recalls(number, ids, heads=slice(head, head + 1)).mean())
            keys, centroids = index.counted()
            assert keys is not None, "only indexes that count are drawn"
            scored.append(keys / len(pair.wide))
            means.append(centroids / len(pair.wide))
    return float(np.mean(recalls)), float(np.mean(scored)), float(np.mean(means))


def mahalanobis(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return distances of queries and of keys to the keys' distribution, over all heads.

    `q` and `k`: quantiles; `q_bins` and `k_bins`: shares of the `edges`' bins; `ratio`: the median
    of the queries over that of the keys, of each head.
    """
    distances: dict[str, list[NDArray[np.float64]]] = {"q": [], "k": []}
    for pair in pairs:
        mean = pair.wide.mean(axis=0)
        spread = np.linalg.inv(np.cov(pair.wide.T.astype(np.float64)))
        for name, rows in (("q", pair.tests.reshape(-1, len(mean))), ("k", pair.wide[::16])):
            gaps = rows - mean
            distances[name].append(np.sqrt(np.einsum("nd,de,ne->n", gaps, spread, gaps)))
    joined = {name: np.concatenate(parts) for name, parts in distances.items()}
    edges = np.linspace(0, np.quantile(joined["q"], 0.995), BINS + 1)
    medians = zip(distances["q"], distances["k"], strict=True)
    return {
        "edges": edges.tolist(),
        "ratio": [float(np.median(q) / np.median(k)) for q, k in medians],
        **{name: np.quantile(rows, QUANTILES).tolist() for name, rows in joined.items()},
        **{
            f"{name}_bins": (np.histogram(rows, edges)[0] / len(rows)).tolist()
            for name, rows in joined.items()
        },
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the three panels."""
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4), constrained_layout=True)
    titles = {"q_to_k": "Queries look for keys", "k_to_k": "Keys look for keys"}
    for axes, (way, title) in zip(panels, titles.items(), strict=False):
        draw_curves(axes, found["curves"][way])
        axes.set_title(f"{title}, {found['tokens']:,} tokens")
    panels[0].legend(fontsize=7, loc="lower right")
    distances = found["mahalanobis"]
    for name, label, colour in (("k", "keys", "#b9bec4"), ("q", "queries", "#1f6f8b")):
        panels[2].stairs(
            distances[f"{name}_bins"], distances["edges"], fill=True, alpha=0.7, color=colour,
            label=label,
        )  # fmt: skip
    panels[2].set_title("Distance to the keys' distribution")
    panels[2].set_xlabel("Mahalanobis distance")
    panels[2].legend()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def draw_curves(axes: Axes, lines: dict[str, list[dict[str, float]]]) -> None:
    """Draw recall against the share scored, one line an index; of ours one without centroids."""
    for kind, points in lines.items():
        _, label, colour = DRAWN[kind]
        recalls = [point["recall"] for point in points]
        scored = [point["scored"] + point["centroids"] for point in points]
        axes.plot(scored, recalls, marker="o", markersize=3, color=colour, label=label)
        if kind == "ours":
            scored = [point["scored"] for point in points]
            axes.plot(scored, recalls, linestyle="--", color=colour, label=f"{label}, keys alone")
    axes.axhline(0.95, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0.3, 1.01)
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=None))
    axes.set_xlabel("keys scored")
    axes.set_ylabel("recall@100")


if __name__ == "__main__":
    main()
