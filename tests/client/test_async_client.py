"""What only AsyncClient does: end with its task, and leave the loop free.

The rest is in the tests that take the fixture `client`, which is both clients in turn.
"""

import asyncio
import inspect
import io
import os
import threading
from pathlib import Path

import grpc
import pytest

from openbook.client import AsyncClient, Client, errors
from openbook.client.uploads import CHUNK_BYTES

from .conftest import FakeServer, Refusal

ID = "0" * 32


def test_both_clients_have_the_same_methods_and_parameters() -> None:
    def methods(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {
            name: list(inspect.signature(method).parameters.values())
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("_") or name == "__init__"
        }

    assert methods(AsyncClient) == methods(Client)


def test_example_in_a_loop(fake: FakeServer) -> None:
    async def run() -> tuple[list[str], str]:
        async with AsyncClient(fake.address) as client:
            context_id = await client.ingest("The keeper's daughter.")
            assert [info.id async for info in client.contexts()] == [context_id]
            pieces = [piece async for piece in client.ask(context_id, "Who?")]
            return pieces, (await client.ask(context_id, "Who?").result()).text

    assert asyncio.run(run()) == (["The ", "keeper's ", "daughter."], "The keeper's daughter.")


def test_cancelled_task_cancels_its_answer(fake: FakeServer) -> None:
    async def run() -> None:
        async with AsyncClient(fake.address) as client:
            context_id = await client.ingest("Some text.")
            fake.service.hold_answer_after = 1
            answer = client.ask(context_id, "Who?")
            assert await anext(answer) == "The "
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await answer.result()
            assert await asyncio.to_thread(fake.service.answer_ended.wait, 10)
            with pytest.raises(errors.Cancelled):
                await answer.result()

    asyncio.run(run())


def test_cancelled_ingest_stops_watching(fake: FakeServer) -> None:
    fake.service.is_watch_held = True

    async def run() -> None:
        async with AsyncClient(fake.address) as client:
            watching = asyncio.Event()
            task = asyncio.create_task(
                client.ingest("Some text.", on_progress=lambda _: watching.set())
            )
            await watching.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(fake.service.watch_ended.wait, 10)

    asyncio.run(run())


@pytest.mark.parametrize("is_closed", [False, True])
def test_upload_ends_with_its_task_or_its_client(is_closed: bool, fake: FakeServer) -> None:
    fake.service.is_upload_held = True

    async def run() -> None:
        client = AsyncClient(fake.address)
        task = asyncio.create_task(client.ingest("Some text."))
        assert await asyncio.to_thread(fake.service.upload_begun.wait, 10)
        if is_closed:
            await client.close()
        else:
            task.cancel()
        with pytest.raises(errors.Cancelled if is_closed else asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.service.upload_ended.wait, 10)
        await client.close()

    asyncio.run(run())


def test_closing_the_client_ends_an_answer_as_cancelled(fake: FakeServer) -> None:
    async def run() -> None:
        client = AsyncClient(fake.address)
        context_id = await client.ingest("Some text.")
        fake.service.hold_answer_after = 1
        answer = client.ask(context_id, "Who?")
        await anext(answer)
        reading = asyncio.create_task(answer.result())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(errors.Cancelled):
            await reading

    asyncio.run(run())


class Slow(io.BytesIO):
    """A file whose reads wait until the loop has turned."""

    turned = threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        assert self.turned.wait(timeout=10), "the loop stood still while a file was read"
        self.turned.clear()
        return super().read(size)


@pytest.mark.parametrize("method", ["ingest", "count_tokens"])
def test_reading_a_file_leaves_the_loop_free(method: str, fake: FakeServer) -> None:
    async def turn() -> None:
        while True:
            Slow.turned.set()
            await asyncio.sleep(0.001)

    async def run() -> None:
        async with AsyncClient(fake.address) as client:
            turning = asyncio.create_task(turn())
            await getattr(client, method)(Slow(b"word" * (CHUNK_BYTES // 2)))
            turning.cancel()

    asyncio.run(run())
    assert fake.service.calls


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="reads a pipe that nobody writes to")
def test_file_is_closed_after_its_reading_was_cancelled(fake: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    async def run() -> None:
        async with AsyncClient(fake.address) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.ingest(path)
        path.open("wb").close()  # lets the thread go on

    asyncio.run(run())
    assert fake.service.calls == []


def test_refusal_before_the_end_of_a_large_upload_keeps_its_reason(fake: FakeServer) -> None:
    async def run() -> None:
        async with AsyncClient(fake.address) as client:
            for _ in range(30):
                fake.service.refuse(
                    "IngestContext", Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")
                )
                with pytest.raises(errors.StoreFull):
                    await client.ingest(b"word " * (4 * CHUNK_BYTES))

    asyncio.run(run())


def test_document_that_is_known_need_not_be_sent_whole(fake: FakeServer) -> None:
    async def run() -> None:
        async with AsyncClient(fake.address) as client:
            first = await client.ingest(b"word " * (4 * CHUNK_BYTES))
            fake.service.is_known_answered_early = True
            for _ in range(10):
                assert await client.ingest(b"word " * (4 * CHUNK_BYTES)) == first

    asyncio.run(run())
