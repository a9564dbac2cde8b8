"""Give each rival the setting that suits it best.

Owns the sweep over what an index may be told and the choice from it. Each setting is asked all test
queries, heads in turn, and the choice is made on those same queries: in the rival's favour, for our
own kinds are tuned at ingest on others. Two choices are measured: for every head its own fastest
setting that finds enough, and the fastest one setting for all heads whose mean is enough. Where
nothing finds enough it is the setting that finds the most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from contenders import Index, Rival
from numpy.typing import NDArray
from pairs import Pair

RECALL_MIN = 0.95  # the paper's bar, and peers'
WARM_QUERIES = 2  # asked before the clock counts


@dataclass(frozen=True, slots=True)
class Setting:
    """What was tried: a build and a width, its recalls (heads,) and microseconds (heads,)."""

    variant: int
    width: int | None
    text: str
    recalls: NDArray[np.float64]
    us: NDArray[np.float64]  # per query head, search alone


@dataclass(frozen=True, slots=True)
class Tuned:
    """One rival over all heads: both choices, and all that was tried."""

    own: list[Rival]
    shared: list[Rival]
    usual: list[Rival]  # at its makers' own width, where they have one
    sweep: list[Setting]


def tune(kind: Callable[..., Index], pairs: list[Pair]) -> Tuned:
    """Build every variant of an index for every head, try every width, choose."""
    variants, widths = kind.variants, kind.widths  # type: ignore[attr-defined]
    built: list[list[tuple[Index, float]]] = []
    sweep: list[Setting] = []
    for number, variant in enumerate(variants):
        built.append([build(kind, variant, pair) for pair in pairs])
        for width in widths or (None,):
            words = [f"{name} {value}" for name, value in variant.items()]
            text = " ".join(words + ([] if width is None else [f"width {width}"]))
            recalls, us = try_out([index for index, _ in built[-1]], pairs, width)
            sweep.append(Setting(number, width, text, recalls, us))
            if (recalls >= RECALL_MIN).all():
                break  # more would only be slower

    def chosen(setting: Setting, head: int) -> Rival:
        index, build_s = built[setting.variant][head]
        make = getattr(index, "contender", Rival)
        rival: Rival = make(
            pairs[head], index, width=setting.width, setting=setting.text, build_s=build_s
        )
        return rival

    heads = range(len(pairs))
    own = [chosen(best(sweep, [head]), head) for head in heads]
    one = best(sweep, list(heads))
    usual = []
    for head, (index, _) in enumerate(built[0]):
        if hasattr(index, "usual_width"):
            width = index.usual_width
            setting = replace(sweep[0], width=width, text=f"width {width}")
            usual.append(chosen(setting, head))
    return Tuned(own, [chosen(one, head) for head in heads], usual, sweep)


def build(kind: Callable[..., Index], variant: dict[str, Any], pair: Pair) -> tuple[Index, float]:
    """Build one index; also return the seconds it took, or those of its parts where it says."""
    index = kind(**variant)
    begin = time.perf_counter()
    index.build(pair.wide, pair.training)
    whole = time.perf_counter() - begin
    return index, sum(index.build_parts_s().values()) or whole


def try_out(
    indexes: list[Index], pairs: list[Pair], width: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return recall and microseconds per query head of every head, (heads,) each."""
    count = len(pairs[0].tests)
    recalls, spent = np.zeros(len(pairs)), np.zeros((len(pairs), count))
    for index in indexes:
        if width is not None:
            index.widen(width)
    for query in range(-min(WARM_QUERIES, count), count):
        for head, (index, pair) in enumerate(zip(indexes, pairs, strict=True)):
            begin = time.perf_counter()
            ids = index.search(pair.tests[query])
            if query >= 0:
                spent[head, query] = time.perf_counter() - begin
                recalls[head] += pair.recalls(query, ids).mean()
    # The median: other work on the machine shall not choose for a rival.
    return recalls / count, np.median(spent, axis=1) * 1e6 / pairs[0].group


def best(sweep: list[Setting], heads: list[int]) -> Setting:
    """Return the fastest setting with enough mean recall over `heads`, else that with the most.

    Of each build only the narrowest that is enough may be chosen: a wider one is faster by chance.
    """
    narrowest: dict[int, Setting] = {}
    for tried in sweep:
        if tried.recalls[heads].mean() >= RECALL_MIN:
            narrowest.setdefault(tried.variant, tried)
    if narrowest:
        return min(narrowest.values(), key=lambda tried: float(tried.us[heads].mean()))
    return max(sweep, key=lambda tried: float(tried.recalls[heads].mean()))
