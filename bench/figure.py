"""Draw the README's picture from the JSON beside it.

    python bench/figure.py [--folder docs/figures]

Reads demo.json (openbook demo --json), fidelity.json (the last line of bench/fidelity.py) and
index.json (bench/index.py --out), writes results.png. It measures nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

OURS, OTHERS = "#1f6f8b", "#b9bec4"


def main() -> None:
    """Draw the three panels."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("docs/figures"))
    folder = parser.parse_args().folder
    demo, fidelity, index = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("demo", "fidelity", "index")
    )
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 3.6), constrained_layout=True)
    draw_first_token(panels[0], demo)
    draw_fidelity(panels[1], fidelity)
    draw_step(panels[2], index)
    figure.savefig(folder / "results.png", dpi=110)


def draw_first_token(axes: Axes, demo: dict[str, Any]) -> None:
    """Draw the seconds to the first token: read again, after a restart, and then."""
    bars = {
        "reading all again": demo["first_token_prefill_s"],
        "after a hard restart": demo["first_token_restored_s"],
        "next questions": demo["first_token_restored_median_s"],
    }
    draw_bars(axes, bars, others=1, unit=" s")
    axes.set_title(f"Time to first token, {demo['context_tokens']:,} tokens")


def draw_fidelity(axes: Axes, fidelity: dict[str, Any]) -> None:
    """Draw the divergence from full attention of what a generated token may read."""
    names = {
        "window_only": "window alone",
        "plain": "100 keys",
        "default": "100 keys + estimate",
    }
    bars = {label: fidelity[name]["kl"] for name, label in names.items()}
    draw_bars(axes, bars, others=2, unit="")
    axes.set_title("KL to full attention, next token")


def draw_step(axes: Axes, index: dict[str, Any]) -> None:
    """Draw how long a step of attention to the middle takes, by what finds its keys."""
    names = {
        "exact": "all keys",
        "flat": "faiss Flat",
        "ivf": "faiss IVF",
        "roargraph-int8": "RoarGraph, our kernels",
        "retroinfer": "RetroInfer-like",
        "graph": "our graph",
        "clusters": "our clusters, default",
    }
    shown = {kind: label for kind, label in names.items() if kind in index["mean"]}
    bars = {}
    for kind, label in shown.items():
        row = index["mean"][kind]
        error = row["error"] if row["error"] is not None else row["error_plain"]
        bars[f"{label} (error {error:.2f})"] = row["us"]
    draw_bars(axes, bars, others=len(bars) - 2, unit=" µs")
    axes.set_title("Attention to 32K keys, a query head, 1 core")


def draw_bars(axes: Axes, bars: dict[str, float], *, others: int, unit: str) -> None:
    """Draw horizontal bars on a log scale, which the axis says, the first `others` grey."""
    colours = [OTHERS if i < others else OURS for i in range(len(bars))]
    drawn = axes.barh(list(bars), list(bars.values()), color=colours)
    axes.bar_label(
        drawn,
        [
            f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"
            for value in bars.values()
        ],
        padding=3,
    )
    axes.set_xscale("log")
    axes.set_xlabel("logarithmic")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
