"""Time to live, verification and counting: what is sent, shown and refused."""

import io
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from openbook.client import Client, ContextInfo, TokenCost, Verification, cli_verbs, errors
from openbook.client.cli_options import read_ttl
from openbook.client.console import print_contexts
from openbook.client.requests import COUNT_BYTES_MAX
from openbook.v1 import contexts_pb2 as pb

from .conftest import FakeServer, Refusal


@pytest.fixture
def openbook(fake: FakeServer) -> Callable[..., Result]:
    """Run a verb against the fake."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli_verbs.app, arguments, env={"OPENBOOK_SERVER": fake.address})

    return run


@pytest.mark.parametrize(
    ("ttl", "seconds", "nanos"),
    [(timedelta(days=7), 604_800, 0), (1.5, 1, 500_000_000), (60, 60, 0)],
)
def test_ttl_of_an_ingest_and_an_update_is_sent(
    ttl: timedelta | float, seconds: int, nanos: int, fake: FakeServer, client: Client
) -> None:
    context_id = client.ingest("Some text.", ttl=ttl)
    client.update(context_id, ttl=ttl)
    for sent in (fake.service.metadata[0].ttl, fake.service.updates[0].ttl):
        assert (sent.seconds, sent.nanos) == (seconds, nanos)


def test_update_returns_when_the_context_expires(client: Client, context_id: str) -> None:
    expires = datetime.fromtimestamp(1_700_000_000 + 3600, UTC)
    assert client.update(context_id, ttl=3600).expires == expires
    assert client.context(context_id).expires == expires
    assert client.update(context_id, ttl=None).expires is None


def test_ttl_not_given_is_left_to_the_service(fake: FakeServer, client: Client) -> None:
    client.update(client.ingest("Some text."), ttl=None)
    assert not fake.service.metadata[0].HasField("ttl")
    assert not fake.service.updates[0].HasField("ttl")


@pytest.mark.parametrize(
    ("ttl", "error"),
    [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), (1e12, ValueError),
     (timedelta(0), ValueError), ("7d", TypeError), (True, TypeError)],
)  # fmt: skip
def test_ttl_that_is_none_is_refused_before_any_call(
    ttl: object, error: type[Exception], fake: FakeServer, client: Client
) -> None:
    with pytest.raises(error, match="ttl"):
        client.ingest("Some text.", ttl=ttl)  # type: ignore[arg-type]
    with pytest.raises(error, match="ttl"):
        client.update("0" * 32, ttl=ttl)  # type: ignore[arg-type]
    assert fake.service.calls == []


def test_verify_returns_what_was_checked(client: Client, context_id: str) -> None:
    assert client.verify(context_id) == Verification(90, 200_000_000, 12, 0.001)


def test_verify_names_damage(fake: FakeServer, client: Client, context_id: str) -> None:
    fake.service.refuse("VerifyContext", Refusal(grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT"))
    with pytest.raises(errors.ContextCorrupt):
        client.verify(context_id)


def test_reindex_returns_the_context(client: Client, context_id: str) -> None:
    info = client.reindex(context_id)
    assert (info.id, info.state) == (context_id, "active")


def test_count_sends_document_and_layout_and_keeps_nothing(
    fake: FakeServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "light.txt"
    path.write_text("one two three", encoding="utf-8")
    for document in (path, "one two three", io.BytesIO(b"one two three")):
        cost = client.count_tokens(document, layout="completion")
        assert cost == TokenCost(tokens=3, kv_bytes=3 * 2304)
    request = pb.CountTokensRequest(
        document=b"one two three", prompt_layout=pb.PROMPT_LAYOUT_COMPLETION
    )
    assert fake.service.counted == [request] * 3
    assert fake.service.contexts == {}


def test_largest_document_that_is_counted_fits_into_a_message(
    fake: FakeServer, client: Client
) -> None:
    assert client.count_tokens(b"x" * COUNT_BYTES_MAX, model="m" * 99).tokens == 1
    with pytest.raises(ValueError, match=f"at most {COUNT_BYTES_MAX} are counted"):
        client.count_tokens(b"x" * (COUNT_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="layout"):
        client.count_tokens("x", layout="prose")  # type: ignore[arg-type]
    assert fake.service.calls == ["CountTokens"]


def test_reached_quota_is_a_full_store(fake: FakeServer, client: Client) -> None:
    refusal = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_QUOTA_REACHED")
    fake.service.refuse("IngestContext", refusal)
    with pytest.raises(errors.StoreFull):
        client.ingest("Some text.")


def test_command_line_touches_verifies_and_lists_the_expiry(
    openbook: Callable[..., Result], fake: FakeServer, context_id: str
) -> None:
    touched = openbook("contexts", "touch", context_id, "--ttl", "12h")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d\n", touched.stdout), touched.stderr
    header, row = (line.split("\t") for line in openbook("contexts", "list").stdout.splitlines())
    assert dict(zip(header, row, strict=True))["expires"] == "2023-11-15T10:13:20+00:00"
    assert openbook("contexts", "touch", context_id, "--ttl", "never").stdout == "never\n"
    verified = openbook("contexts", "verify", context_id)
    assert re.search(r"^bytes_checked +200000000$", verified.stdout, re.MULTILINE)
    verified = openbook("contexts", "verify", context_id, "--json")
    assert json.loads(verified.stdout)["probes_checked"] == 12
    indexed = openbook("contexts", "reindex", context_id, "--json")
    assert json.loads(indexed.stdout)["id"] == context_id
    assert openbook("contexts", "reindex", context_id).stdout.startswith("id")


def test_command_line_counts_and_ingests_with_a_ttl(
    openbook: Callable[..., Result], fake: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "light.txt"
    path.write_text("one two three", encoding="utf-8")
    counted = openbook("count", str(path), "--layout", "chat")
    assert re.search(r"^tokens +3$", counted.stdout, re.MULTILINE)
    assert re.search(r"^on disk, about +8\.99 kB$", counted.stdout, re.MULTILINE)
    assert json.loads(openbook("count", str(path), "--json").stdout)["tokens"] == 3
    assert openbook("ingest", str(path), "--ttl", "7d").exit_code == 0
    assert fake.service.metadata[0].ttl.seconds == 604_800
    assert openbook("ingest", str(path), "--ttl", "never").exit_code == 2


def test_times_to_live_are_read() -> None:
    given = ["7d", "12h", "30m", "5s", "3600", "1.5h", "never"]
    assert [read_ttl(text) for text in given] == [604_800, 43_200, 1_800, 5, 3_600, 5_400, None]
    for wrong in ("", "7w", "-1", "d", "1e9", "\u0667d", "7 d"):
        with pytest.raises(ValueError, match="--ttl is a time such as"):
            read_ttl(wrong)


@pytest.mark.parametrize("ttl_days", [None, 6])
def test_table_shows_what_is_left_where_something_expires(ttl_days: int | None) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    message = pb.Context(name=f"contexts/{'0f' * 16}")
    if ttl_days is not None:
        message.expire_time.FromDatetime(now + timedelta(days=ttl_days))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    print_contexts([ContextInfo.from_message(message)], console, now=now)
    assert ("left" in out.getvalue()) == ("6 d" in out.getvalue()) == (ttl_days is not None)
