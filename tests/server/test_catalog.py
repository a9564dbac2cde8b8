"""Pages lose nothing while contexts come and go, and a watcher sees the end."""

import asyncio

import pytest

from openbook.server.catalog import Catalog, Entry, Stage, State
from openbook.server.errors import ContextUnknown


def entry(number, state=State.CREATING, created=None):
    created = float(number) if created is None else created
    return Entry(f"{number:032x}", "m", "chat", state, created)


def test_pages_are_newest_first_and_lose_nothing_while_contexts_come_and_go():
    catalog = Catalog(entry(i, created=float(i // 3)) for i in range(10))  # ages tie in threes
    first, token = catalog.page(4, "")
    catalog.put(entry(99, created=99.0))
    catalog.remove(first[1].context_id)
    seen = [e.context_id for e in first]
    while token:
        page, token = catalog.page(4, token)
        seen += [e.context_id for e in page]
    assert len(seen) == len(set(seen)) == 10
    ages = [int(name, 16) // 3 for name in seen]
    assert ages == sorted(ages, reverse=True)


def test_a_page_that_ends_exactly_has_no_next_one():
    catalog = Catalog(entry(i) for i in range(4))
    assert catalog.page(4, "")[1] == "" and catalog.page(3, "")[1] != ""


def test_a_slow_watcher_misses_steps_but_never_the_end():
    async def run():
        catalog = Catalog([entry(1)])
        name = entry(1).context_id
        seen = []
        async for found in catalog.watch(name):
            seen.append((found.state, found.layers_done))
            if len(seen) == 1:
                for layer in range(5):
                    catalog.progress(name, Stage.READING, layer, 5)
                catalog.put(entry(1, State.ACTIVE))
        assert seen == [(State.CREATING, 0), (State.ACTIVE, 0)]

    asyncio.run(run())


def test_a_watcher_of_a_removed_context_is_told():
    async def run():
        catalog = Catalog([entry(1)])
        watching = catalog.watch(entry(1).context_id)
        await anext(watching)
        catalog.remove(entry(1).context_id)
        with pytest.raises(ContextUnknown):
            await anext(watching)

    asyncio.run(run())


def test_progress_of_a_context_that_is_no_longer_read_is_ignored():
    catalog = Catalog([entry(1, State.ACTIVE)])
    catalog.progress(entry(1).context_id, Stage.READING, 1, 2)
    catalog.progress(entry(2).context_id, Stage.READING, 1, 2)
    assert catalog.get(entry(1).context_id).stage is Stage.QUEUED
    assert catalog.find(entry(2).context_id) is None
