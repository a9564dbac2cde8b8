"""An ingest worker in a process of its own, for the tests of one that is stopped and goes on.

    queue_process.py ROOT SOCKET WORKER

It says "ready", waits for a line on its input, claims the next document, says "claimed ID", makes
its context, says "sealed", waits for a line again, publishes, and says "published True|False held
True|False": whether it was the first, and whether its claim was still its own. A claim without a
beat for STALE_MS is taken over.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from conftest import Maker  # of tests/indexstore, on the path of whoever starts this

from openbook.indexstore.store import publish
from openbook.server import ingest_queue
from openbook.server.broker import Broker
from openbook.server.ingest_queue import IngestQueue

STALE_MS = 400


class Silent:
    """A log that says nothing."""

    def info(self, event: str, /, **fields: object) -> None:
        """Ignore an event."""

    warning = error = info


async def work(root: Path, socket: str, worker: str) -> None:
    ingest_queue.STALE_MS, ingest_queue.POLL_S = STALE_MS, 0.05
    broker = Broker(f"unix://{socket}", log=Silent())
    queue = IngestQueue(broker, store="s", worker_id=worker)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    claim = await queue.take()
    print("claimed", claim.context_id, flush=True)
    beating = asyncio.create_task(_beat(queue, claim))
    maker = Maker(root)
    fields = maker.fields(700, context_id=claim.context_id)
    draft = await asyncio.to_thread(maker.draft, fields)
    print("sealed", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    is_held = await queue.beat(claim)
    is_first = await asyncio.to_thread(publish, draft, maker.final(claim.context_id))
    print("published", is_first, "held", is_held, flush=True)
    beating.cancel()
    await queue.done(claim)
    await broker.close()


async def _beat(queue: IngestQueue, claim: ingest_queue.Claim) -> None:
    while await queue.beat(claim):
        await asyncio.sleep(STALE_MS / 4000)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), *sys.argv[2:4]))
