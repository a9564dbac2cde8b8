"""A context that was acknowledged survives a power cut, and one that was not is whole or absent.

This is a simulation over the trace of one publish, or of one replacement (power_loss.py): no
device is cut.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from power_loss import Disk
from shimmed import Call, Shimmed

from openbook.indexstore.store import open_context

RANDOM_SUBSETS = 200


def losses(volatile: list[int], rng: random.Random, subsets: int) -> Iterator[set[int]]:
    """Yield nothing lost, everything lost, each change alone, and random subsets."""
    yield set()
    yield set(volatile)
    yield from ({change} for change in volatile)
    for _ in range(subsets if volatile else 0):
        yield set(rng.sample(volatile, rng.randrange(len(volatile) + 1)))


def broken(disk: Disk, instants: Iterable[int], subsets: int) -> tuple[list[str], int]:
    """Return what no power cut may leave, and how many states were looked at.

    Until the writer has returned: neither what was there before nor what it made, byte for byte.
    From then on: anything but what it made.
    """
    rng, found, states = random.Random(2), [], 0
    prepared, returned = disk.index("prepared"), disk.index("returned")
    before = context_of(disk.tree(prepared, ()))
    whole = context_of(disk.tree(len(disk.changes), ()))
    assert len(whole) == 4 and before != whole
    for until in instants:
        for lost in losses(disk.volatile(until), rng, subsets):
            states += 1
            left = context_of(disk.tree(until, lost))
            if left != whole and (left != before or until > returned):
                names = sorted({disk.changes[i].call.path.name for i in lost})
                found.append(f"{len(left)} files at call {until} without {names}")
    return found, states


def context_of(tree: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files that stand in the place of a published context."""
    return {path: content for path, content in tree.items() if "/local/" in path}


def without_sync(calls: list[Call], path: Path) -> list[Call]:
    return [call for call in calls if (call.op, call.path) != ("fsync", path)]


def instants(disk: Disk, step: int) -> list[int]:
    """Return some of the instants up to the seal, and each from the manifest's sync on."""
    last = max(i for i, c in enumerate(disk.changes) if c.call.path.name == "manifest.json")
    prepared = disk.index("prepared")
    return [*range(prepared, last, step), *range(last, len(disk.changes) + 1)]


@pytest.mark.parametrize(
    ("step", "subsets"), [(30, 50), pytest.param(1, RANDOM_SUBSETS, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("verb", ["publish", "replace"])
def test_no_power_cut_leaves_half_a_context_or_takes_an_acknowledged_one(
    shimmed: Shimmed, verb: str, step: int, subsets: int
) -> None:
    calls = shimmed.trace(verb)
    disk = Disk(calls, shimmed.data.read_bytes(), shimmed.root)
    found, states = broken(disk, instants(disk, step), subsets)
    assert found == []
    assert states > 500
    print(f"{states} states")


def test_state_with_everything_unsynced_lost_opens_as_a_context(
    shimmed: Shimmed, tmp_path: Path
) -> None:
    """The model's files are a store's: what it calls whole is what a reader opens."""
    disk = Disk(shimmed.trace(), shimmed.data.read_bytes(), shimmed.root)
    end = len(disk.changes)
    for path, content in context_of(disk.tree(end, set(disk.volatile(end)))).items():
        file = tmp_path / "after" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (context,) = (tmp_path / "after" / "traced" / "local").iterdir()
    open_context(context, model_fingerprint="sha256:model-a").close()


def test_every_sync_of_a_publish_is_needed(shimmed: Shimmed) -> None:
    """Without any one of them the simulation finds a loss: so it can find one."""
    calls, data = shimmed.trace(), shimmed.data.read_bytes()
    (rename,) = (call for call in calls if call.op == "rename")
    store = rename.to.parent.parent
    files = {call.path for call in calls if call.op == "create"}
    for path in (*files, rename.path, rename.to.parent, store, store.parent):
        disk = Disk(without_sync(calls, path), data, shimmed.root)
        last = len(disk.changes)
        assert broken(disk, [last], subsets=5)[0], f"the sync of {path.name} is not missed"
