"""The real client and command line against a real `openbook serve` over a tiny random model.

Owns the seam between the two: what each shows of the other. Their own tests cover each alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from openbook.client import AsyncClient, Client, IngestProgress, cli_verbs, errors
from openbook.client.demo_server import DemoServer, serve_command

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
QUESTION = "How many ships?"


def document(days: int = 60, keeper: str = "The keeper") -> str:
    """Return a text of about 1,000 tokens of the tiny model, so that there is a middle."""
    return " ".join(f"{keeper} counted {day * 7919 % 997} ships." for day in range(days))


class Service:
    """A server process over one data directory, and the clients that a test opens."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.data = folder / "data"
        self.log = folder / "log"
        command = [*serve_command(str(model), self.data), "--threads", "1"]
        self._server = DemoServer(command, log=self.log)
        self.address = self._server.start()

    def client(self) -> Client:
        return Client(self.address)

    def openbook(self, *arguments: str) -> Result:
        """Run a verb of the command line in this process."""
        return CliRunner().invoke(cli_verbs.app, arguments, env={"OPENBOOK_SERVER": self.address})

    def restart(self) -> None:
        """Kill the server hard and start it again."""
        self._server.kill()
        self.address = self._server.start()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def service(
    tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    running = Service(tiny_model_directory, tmp_path_factory.mktemp("service"))
    yield running
    running.stop()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


@pytest.fixture
def context_id(client: Client) -> str:
    """Return the id of one document, which is read once for all tests."""
    return client.ingest(document(), display_name="ships")


def test_a_document_is_read_with_progress_asked_listed_and_deleted(client: Client) -> None:
    seen: list[IngestProgress] = []
    text = document(keeper="The watchman")
    context_id = client.ingest(text, display_name="watch", on_progress=seen.append)
    assert (seen[-1].stage, seen[-1].layers_done, seen[-1].layers) == ("done", 2, 2)
    assert client.ingest(text) == context_id
    info = client.context(context_id)
    assert (info.state, info.layout, info.display_name) == ("active", "chat", "watch")
    assert info.bytes_on_disk > info.kv_bytes_16bit > 0 and info.timing.prefill_s > 0
    assert context_id in [listed.id for listed in client.contexts()]
    client.delete(context_id)
    assert context_id not in [listed.id for listed in client.contexts()]
    with pytest.raises(errors.NotFound):
        client.ask(context_id, QUESTION).result()


def test_an_answer_streams_and_ends_with_usage_and_receipt(client: Client, context_id: str) -> None:
    with client.ask(context_id, QUESTION, max_tokens=12) as answer:
        pieces = list(answer)
        result = answer.result()
    assert len(pieces) > 1 and "".join(pieces) == result.text
    usage, receipt = result.usage, result.receipt
    assert usage.context_tokens == receipt.tokens_reused == client.context(context_id).token_count
    assert usage.question_tokens == receipt.tokens_prefilled > 0
    assert 0 < usage.answer_tokens <= 12
    assert (result.finish_reason == "length") == (usage.answer_tokens == 12)
    assert receipt.budget == "keys=100+estimate" and receipt.bytes_mapped > 0
    exact = client.ask(context_id, QUESTION, max_tokens=12, budget="exact").result()
    assert exact.receipt.budget == "exact"


def test_a_context_is_counted_kept_for_a_time_and_verified(client: Client) -> None:
    text = document(keeper="The clerk")
    cost = client.count_tokens(text)
    context_id = client.ingest(text, ttl=3600)
    info = client.context(context_id)
    assert (cost.tokens, cost.kv_bytes) == (info.token_count, info.kv_bytes_16bit)
    assert info.created is not None and info.expires is not None
    assert client.update(context_id, ttl=timedelta(days=7)).expires > info.expires
    assert client.update(context_id, ttl=None).expires is None
    verification = client.verify(context_id)
    assert verification.records_checked > 0 and verification.probes_checked > 0
    assert verification.bytes_checked > info.kv_bytes_16bit


def test_a_context_is_indexed_anew_under_its_answers(client: Client, service: Service) -> None:
    context_id = client.ingest(document(keeper="The stoker"))
    exact = client.ask(context_id, QUESTION, max_tokens=24, budget="exact").result()
    manifest = service.data / "contexts" / "local" / context_id / "manifest.json"
    before = manifest.stat().st_ino
    with client.ask(context_id, QUESTION, max_tokens=200, budget="exact") as answer:
        first = next(answer)
        info = client.reindex(context_id)
        text = first + "".join(answer)
    assert manifest.stat().st_ino != before
    assert (info.state, info.token_count) == ("active", exact.usage.context_tokens)
    assert text.startswith(exact.text)
    assert (
        client.ask(context_id, QUESTION, max_tokens=24, budget="exact").result().text == exact.text
    )
    assert client.verify(context_id).largest_error < 1e-4


def test_async_client_reads_asks_and_cancels(service: Service) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            context_id = await client.ingest(document(), display_name="ships")
            pieces = [piece async for piece in client.ask(context_id, QUESTION, max_tokens=12)]
            result = await client.ask(context_id, QUESTION, max_tokens=12).result()
            assert "".join(pieces) == result.text
            assert result.receipt.tokens_prefilled == result.usage.question_tokens > 0
            async with client.ask(context_id, QUESTION, max_tokens=2000) as answer:
                await anext(answer)
            with pytest.raises(errors.Cancelled):
                await answer.result()
            with pytest.raises(errors.NotFound):
                await client.delete("0" * 32)

    asyncio.run(run())


def test_doctor_and_capacity_agree_with_the_server(service: Service) -> None:
    done = service.openbook("doctor", "--data", str(service.data))
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"ok"}, done.stdout
    assert done.exit_code == 0 and "ok health: serving" in done.stdout
    with service.client() as client:
        cost = client.count_tokens(document())
    found = service.openbook("capacity", "--tokens", str(cost.tokens), "--json").stdout
    assert json.loads(found)["kv_bytes"] == cost.kv_bytes


def test_models_names_what_is_served(client: Client, tiny_model_directory: Path) -> None:
    (model,) = client.models()
    assert (model.name, model.layers) == (tiny_model_directory.name, 2)
    assert model.layouts == ("chat", "completion")


REFUSED: dict[str, tuple[Callable[[Client, str], object], type[errors.OpenbookError]]] = {
    "DOCUMENT_TOO_LONG": (lambda c, _: c.ingest("word " * 9000), errors.DocumentTooLong),
    "MODEL_UNKNOWN": (lambda c, _: c.ingest("text", model="other"), errors.NotFound),
    "ARGUMENT_INVALID": (
        lambda c, name: c.ask(name, QUESTION, max_tokens=0).result(),
        errors.InvalidRequest,
    ),
    "QUESTION_TOO_LONG": (
        lambda c, name: c.ask(name, "ships " * 4000).result(),
        errors.QuestionTooLong,
    ),
    "CONTEXT_UNKNOWN": (lambda c, _: c.delete("0" * 32), errors.NotFound),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_arrives_as_its_own_error(client: Client, context_id: str, reason: str) -> None:
    call, kind = REFUSED[reason]
    with pytest.raises(kind) as caught:
        call(client, context_id)
    assert (type(caught.value), caught.value.reason) == (kind, reason)
    assert "ships" not in str(caught.value) and "word" not in str(caught.value)


def test_a_passed_timeout_and_a_cancelled_answer_are_named(client: Client, context_id: str) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        client.ask(context_id, QUESTION, max_tokens=2000, timeout=0.05).result()
    answer = client.ask(context_id, QUESTION, max_tokens=2000)
    next(answer)
    answer.cancel()
    with pytest.raises(errors.Cancelled):
        answer.result()


def test_an_answer_under_way_outlives_its_context(client: Client) -> None:
    context_id = client.ingest(document(keeper="The pilot"))
    expected = "".join(client.ask(context_id, QUESTION, max_tokens=64))
    with client.ask(context_id, QUESTION, max_tokens=64) as answer:
        text = next(answer)
        client.delete(context_id)
        with pytest.raises(errors.NotFound):
            client.ask(context_id, QUESTION).result()
        assert text + "".join(answer) == expected


def test_damaged_bytes_are_named(service: Service, client: Client) -> None:
    context_id = client.ingest(document(keeper="The cook"))
    shard = service.data / "contexts" / "local" / context_id / "layer-000.mdb"
    shard.chmod(0o600)
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(errors.ContextCorrupt):
        client.ask(context_id, QUESTION).result()


def test_nobody_at_the_address_is_unavailable() -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(errors.Unavailable):
        client.ask("0" * 32, QUESTION).result()


def test_command_line_reads_asks_lists_and_deletes(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(document(keeper="The mate"), encoding="utf-8")
    read = service.openbook("ingest", str(path))
    assert read.exit_code == 0, read.stderr
    context_id = read.stdout.strip()
    assert read.stderr.splitlines()[-1] == "done 2/2 layers"
    asked = service.openbook("ask", context_id, QUESTION, "--max-tokens", "8", "--json")
    result = json.loads(asked.stdout)
    assert result["receipt"]["tokens_reused"] == result["usage"]["context_tokens"] > 0
    shown = service.openbook("ask", context_id, QUESTION, "--max-tokens", "8", "--receipt")
    assert shown.stdout.rstrip("\n") == result["text"].rstrip("\n")
    assert re.search(r"^tokens_prefilled +\d+$", shown.stderr, re.MULTILINE)
    rows = service.openbook("contexts", "list").stdout.splitlines()
    row = next(row.split("\t") for row in rows if row.startswith(context_id))
    assert (row[1], row[2], row[-1]) == ("chat", "active", "log.txt")
    assert "layout" in service.openbook("contexts", "show", context_id).stdout
    assert service.openbook("contexts", "delete", context_id).exit_code == 0
    gone = service.openbook("ask", context_id, QUESTION)
    assert (gone.exit_code, gone.stdout, gone.stderr.count("\n")) == (1, "", 1)


def test_readme_snippet_runs_as_it_is_written(service: Service, tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "report.txt").write_text(document(keeper="The signer"), encoding="utf-8")
    program = snippet.replace("localhost:50051", service.address)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert program != snippet and done.returncode == 0, done.stderr
    assert "tokens from the store" in done.stdout and "read for this question" in done.stdout


def test_answers_are_the_same_after_a_hard_restart(service: Service) -> None:
    with service.client() as client:
        context_id = client.ingest(document())
        before = client.ask(context_id, QUESTION, max_tokens=12).result()
    service.restart()
    with service.client() as client:
        after = client.ask(context_id, QUESTION, max_tokens=12).result()
        (model,) = client.models()
    assert after.text == before.text and after.finish_reason == before.finish_reason
    assert after.receipt.tokens_prefilled == after.usage.question_tokens
    assert model.tokens_forwarded <= after.usage.question_tokens + 12
    log = service.log.read_text()
    assert "keeper" not in log and "ships" not in log


def test_a_model_without_a_chat_template_continues(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_directory, tmp_path / "plain")
    (model / "chat_template.jinja").unlink()
    service = Service(model, tmp_path)
    try:
        with service.client() as client:
            assert client.context(client.ingest(document())).layout == "completion"
            with pytest.raises(errors.InvalidRequest, match="layout"):
                client.ingest(document(), layout="chat")
    finally:
        service.stop()
