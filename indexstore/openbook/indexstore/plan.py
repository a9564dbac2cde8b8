"""What each head does under a `keys` budget: a pure function of shapes, fixed at ingest.

Owns the threshold between scanning and walking the graph. The plan is stored in the manifest, so
that every worker answers alike; a forced plan is for measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from openbook.indexstore.head import HeadPlan, PlanKind

# Extrapolated, not measured: a scan grows with the keys and a walk hardly does, and at 32,128 keys
# they took 568 and 382 microseconds a query head (docs/LOG.md), so they meet somewhat below.
GRAPH_KEYS_MIN = 24_576
QUEUE_NODES = 128  # expanded per query head; recall of the top 100 near 0.97 on real queries


def plan_head(middle_tokens: int) -> HeadPlan:
    """Choose how one KV head of `middle_tokens` keys answers."""
    kind: PlanKind = "graph" if middle_tokens >= GRAPH_KEYS_MIN else "scan"
    return HeadPlan(kind=kind, queue=QUEUE_NODES)


def force_plan(plan: Sequence[HeadPlan], kind: PlanKind) -> tuple[HeadPlan, ...]:
    """Return `plan` with every head scanning, or every head walking its graph."""
    return tuple(replace(head, kind=kind) for head in plan)
