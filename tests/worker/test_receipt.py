"""Claims about receipts: complete, and named as people read them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from openbook.indexstore.head import EXACT, Budget, HeadPlan
from openbook.v1 import contexts_pb2
from openbook.worker.receipt import Receipt, Usage, describe_budget, describe_plan


@pytest.mark.parametrize(
    ("ours", "wire"), [(Receipt, contexts_pb2.Receipt), (Usage, contexts_pb2.Usage)]
)
def test_every_field_of_the_wire_is_filled(ours: type, wire: type) -> None:
    names = {field.name for field in wire.DESCRIPTOR.fields}
    assert {field.name for field in fields(ours)} == names


def test_budgets_are_described() -> None:
    assert describe_budget(EXACT) == "exact"
    assert describe_budget(Budget()) == "keys=100+estimate"
    assert describe_budget(Budget(keys=7, estimate=False)) == "keys=7"


def test_plans_are_described() -> None:
    scan, graph = HeadPlan("scan", 8), HeadPlan("graph", 8)
    assert describe_plan(((scan, graph), (scan, scan))) == "graph:1 scan:3"
    assert describe_plan(((graph,), (graph,))) == "graph"
    assert describe_plan(((), ())) == "window"
