"""Whatever write, sync or rename fails or is the last: no context is there, or all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from shimmed import Call, Shimmed


def faultable(calls: list[Call], kind: str, step: int) -> list[int]:
    """Return the calls to fail: each `step`-th write, and what is no write (it has no half)."""
    writes = [call.number for call in calls if call.op == "write"]
    others = [call.number for call in calls if call.number and call.op != "write"]
    return writes[::step] if kind == "short" else sorted(writes[::step] + others)


OUTCOMES = {
    "kill": {"SIGKILL absent whole", "SIGKILL old whole"},
    "eio": {"failed absent whole", "failed old whole"},
    "enospc": {"failed absent whole", "failed old whole"},
    # Python finishes the manifest's short write.
    "short": {"failed absent whole", "whole old whole"},
}


def check_matrix(shimmed: Shimmed, kind: str, step: int) -> None:
    calls = shimmed.trace()
    numbers = faultable(calls, kind, step)
    outcomes = shimmed.matrix(kind, numbers)
    assert set(outcomes) <= OUTCOMES[kind], outcomes
    assert outcomes.total() == len(numbers)
    if kind != "short":
        # The one call after the rename: the sync of the name, whose failure leaves it in place.
        assert sum(n for end, n in outcomes.items() if end.endswith("old whole")) == 1


@pytest.mark.parametrize(
    ("kind", "step"), [("kill", 9), ("eio", 24), ("enospc", 36), ("short", 12)]
)
def test_fault_at_a_call_leaves_no_context_or_the_whole(
    shimmed: Shimmed, kind: str, step: int
) -> None:
    check_matrix(shimmed, kind, step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OUTCOMES))
def test_fault_at_every_call_leaves_no_context_or_the_whole(shimmed: Shimmed, kind: str) -> None:
    check_matrix(shimmed, kind, 1)


def position(calls: list[Call], op: str, path: Path) -> int:
    (found,) = [at for at, call in enumerate(calls) if (call.op, call.path) == (op, path)]
    return found


def test_syncs_come_in_the_order_that_makes_a_publish_durable(shimmed: Shimmed) -> None:
    calls = shimmed.trace()
    (renamed,) = [at for at, call in enumerate(calls) if call.op == "rename"]
    draft, final = calls[renamed].path, calls[renamed].to
    files = {call.path for call in calls if call.op == "create"}
    synced = {file: position(calls, "fsync", file) for file in files}
    for file in files:
        writes = [at for at, call in enumerate(calls) if (call.op, call.path) == ("write", file)]
        assert writes and max(writes) < synced[file], file.name
    manifest = draft / "manifest.json"
    assert {file.parent for file in files} == {draft} and len(files) == 4
    assert max(at for file, at in synced.items() if file != manifest) < synced[manifest]
    assert synced[manifest] < position(calls, "fsync", draft) < renamed
    store = final.parent.parent
    made = position(calls, "mkdir", final.parent)
    assert made < position(calls, "fsync", store) < renamed
    assert renamed < position(calls, "fsync", final.parent)
    assert calls[-1].op == "returned"
    assert position(calls, "mkdir", store) < min(
        at for at, call in enumerate(calls) if (call.op, call.path) == ("fsync", store.parent)
    )
