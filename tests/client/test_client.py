"""The client against a fake service on loopback: what is sent, and what comes back."""

from pathlib import Path

import pytest

from openbook.client import Client, IngestProgress, Tls, errors
from openbook.client.channel import is_loopback
from openbook.client.uploads import CHUNK_BYTES
from openbook.v1 import contexts_pb2 as pb

from .conftest import LAYERS, FakeServer

MIB_4 = 4_194_304


def test_ingest_returns_the_id_once_active(fake: FakeServer, client: Client) -> None:
    seen: list[IngestProgress] = []
    accepted: list[str] = []
    context_id = client.ingest(
        "Some text.", layout="completion", on_accepted=accepted.append, on_progress=seen.append
    )
    assert accepted == [context_id]
    info = client.context(context_id)
    assert (info.id, info.state, info.layout) == (context_id, "active", "completion")
    assert [step.layers_done for step in seen] == [0, 1, 2, 3, 3]
    assert {step.layers for step in seen} == {LAYERS}
    assert seen[-1].stage == "done"
    assert fake.service.documents == [b"Some text."]


def test_second_ingest_neither_watches_nor_makes_a_context(
    fake: FakeServer, client: Client
) -> None:
    first = client.ingest("Some text.")
    accepted: list[str] = []
    assert client.ingest("Some text.", on_accepted=accepted.append) == first
    assert accepted == []
    assert fake.service.calls.count("WatchContext") == 1


def test_ingest_sends_name_model_layout_and_digest(
    fake: FakeServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "light.txt"
    path.write_bytes(b"The light.")
    client.ingest(path)
    client.ingest("The tower.", display_name="tower", model="fake", layout="chat")
    by_path, by_text = fake.service.metadata
    assert by_path.display_name == "light.txt"
    assert (by_text.display_name, by_text.model) == ("tower", "fake")
    assert by_path.prompt_layout == pb.PROMPT_LAYOUT_UNSPECIFIED
    assert by_text.prompt_layout == pb.PROMPT_LAYOUT_CHAT
    assert len(by_text.sha256) == 32


@pytest.mark.parametrize("size", [MIB_4 - 1, MIB_4, MIB_4 + 1, 4_298_239])
def test_case_b58_documents_around_four_mebibytes_behave_alike(
    size: int, fake: FakeServer, client: Client
) -> None:
    document = b"word " * (size // 5) + b"x" * (size % 5)
    context_id = client.ingest(document)
    assert client.context(context_id).state == "active"
    assert fake.service.documents[0] == document
    assert max(fake.service.chunk_sizes[0]) <= CHUNK_BYTES


def test_case_b58_question_over_a_mebibyte_is_refused_before_any_call(
    fake: FakeServer, client: Client
) -> None:
    with pytest.raises(ValueError, match="5000000 bytes; at most 1048576"):
        client.ask("0" * 32, "x" * 5_000_000)
    assert fake.service.calls == []


def test_case_b56_text_that_is_not_utf8_is_refused_before_any_call(
    fake: FakeServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="byte offset 3"):
        client.ingest(path)
    with pytest.raises(ValueError, match="byte offset 3"):
        client.ingest(b"caf\xe9")
    with pytest.raises(ValueError, match="character offset 5"):
        client.ingest("light\ud83d")
    with pytest.raises(ValueError, match="the question .* character offset 3"):
        client.ask("0" * 32, "Who\ud83d?")
    with pytest.raises(ValueError, match="answer_prefix .* character offset 0"):
        client.ask("0" * 32, "Who?", answer_prefix="\ud83d")
    with pytest.raises(ValueError, match="a stop string .* character offset 1"):
        client.ask("0" * 32, "Who?", stop=["\n", "a\ud83d"])
    with pytest.raises(ValueError, match="display_name .* character offset 0"):
        client.ingest("light", display_name="\ud83d")
    assert fake.service.calls == []


@pytest.mark.parametrize("document", ["", b"", " \n\t", "\u3000" * 400_000, b" " * (1 << 21)])
def test_document_without_text_is_refused_before_any_call(
    document: str | bytes, fake: FakeServer, client: Client
) -> None:
    with pytest.raises(ValueError, match="the document is empty, or whitespace alone"):
        client.ingest(document)
    assert fake.service.calls == []


def test_case_b56_three_nul_bytes_are_a_document(fake: FakeServer, client: Client) -> None:
    client.ingest("\0\0\0")
    assert fake.service.documents == [b"\0\0\0"]


def test_failed_ingest_raises_the_class_of_its_reason(fake: FakeServer, client: Client) -> None:
    fake.service.failed_ingest = pb.ContextError(
        reason="DOCUMENT_TOO_LONG", message="9000 tokens; the model takes 8192"
    )
    seen: list[IngestProgress] = []
    with pytest.raises(errors.DocumentTooLong, match="9000 tokens") as caught:
        client.ingest("Some text.", on_progress=seen.append)
    assert str(seen[-1]) == seen[-1].stage == "failed"
    assert caught.value.reason == "DOCUMENT_TOO_LONG"


def test_failed_ingest_of_an_unknown_reason_is_ingest_failed(
    fake: FakeServer, client: Client
) -> None:
    fake.service.failed_ingest = pb.ContextError(reason="NEW", message="")
    with pytest.raises(errors.IngestFailed, match="gave the document up"):
        client.ingest("Some text.")


def test_watch_that_ends_early_is_a_fault(fake: FakeServer, client: Client) -> None:
    fake.service.is_watch_cut = True
    with pytest.raises(errors.ServerFault, match="still being read"):
        client.ingest("Some text.")


def test_error_in_on_progress_reaches_the_caller(client: Client) -> None:
    def fail(progress: IngestProgress) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.ingest("Some text.", on_progress=fail)


def test_file_that_cannot_be_read_raises_its_own_error(client: Client, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        client.ingest(tmp_path / "missing.txt")
    with pytest.raises(IsADirectoryError):
        client.ingest(tmp_path)


def test_contexts_crosses_pages(fake: FakeServer, client: Client) -> None:
    ids = [client.ingest(f"Text {number}.") for number in range(5)]
    assert [info.id for info in client.contexts()] == ids
    assert fake.service.calls.count("ListContexts") == 3


def test_context_shows_every_field(client: Client, context_id: str) -> None:
    info = client.context(f"contexts/{context_id}")
    assert info.id == context_id
    assert info.model == "fake"
    assert info.token_count == 7000
    assert info.bytes_on_disk == 200_000_000
    assert info.kv_bytes_16bit == 161_280_000
    assert info.timing.prefill_s == 40.0
    assert info.created is not None and info.created.isoformat() == "2023-11-14T22:13:20+00:00"
    assert info.expires is None
    with pytest.raises(AttributeError):
        info.id = "other"  # type: ignore[misc]


def test_delete_removes_and_then_is_not_found(client: Client, context_id: str) -> None:
    client.delete(context_id)
    with pytest.raises(errors.NotFound):
        client.delete(context_id)


def test_models_lists_known_layouts_only(client: Client) -> None:
    (model,) = client.models()
    assert model.layouts == ("chat", "completion")
    assert (model.name, model.positions_max, model.tokens_forwarded) == ("fake", 8192, 7000)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ("", "''"),
        ("nosuchid", "'nosuchid'"),
        ("contexts/0", "'0'"),
        ("0" * 33, f"'{'0' * 33}'"),
        ("A" * 32, f"'{'A' * 32}'"),
        ("x" * 41, f"'{'x' * 39}…'"),
        ("red\x1b[31m\n", r"'red\x1b[31m\n'"),
        ("\ud83d\u202e", r"'\ud83d\u202e'"),
    ],
)
def test_what_is_no_context_id_is_refused_before_any_call(
    wrong: str, shown: str, fake: FakeServer, client: Client
) -> None:
    for call in (lambda: client.ask(wrong, "Who?"), lambda: client.context(wrong)):
        with pytest.raises(ValueError) as caught:
            call()
        said = f"{shown} is not a context id (32 hexadecimal digits; see `openbook contexts list`)"
        assert str(caught.value) == said
    with pytest.raises(ValueError, match="is not a context id"):
        client.delete(wrong)
    assert fake.service.calls == []


def test_wrong_type_is_a_type_error_that_names_the_parameter(client: Client) -> None:
    with pytest.raises(TypeError, match="context_id must be a str, not int"):
        client.ask(7, "Who?")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="context_id must be a str, not NoneType"):
        client.delete(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the question must be a str, not bytes"):
        client.ask("0" * 32, b"Who?")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="display_name must be a str, not int"):
        client.ingest("text", display_name=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_tokens must be an int, not str"):
        client.ask("0" * 32, "Who?", max_tokens="7")  # type: ignore[arg-type]


def test_seed_has_the_limit_of_the_service(
    fake: FakeServer, client: Client, context_id: str
) -> None:
    client.ask(context_id, "Who?", seed=2**63 - 1).result()
    assert fake.service.asked[0].seed == 2**63 - 1
    with pytest.raises(ValueError, match="seed is 9223372036854775808; it must lie between 0"):
        client.ask(context_id, "Who?", seed=2**63)


def test_empty_address_is_refused() -> None:
    with pytest.raises(ValueError, match="address is empty; it is host:port"):
        Client("")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), -float("inf")])
def test_timeout_that_is_none_is_refused(timeout: float, client: Client) -> None:
    with pytest.raises(ValueError, match="timeout"):
        client.ingest("text", timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        client.ask("0" * 32, "Who?", timeout=timeout)


@pytest.mark.parametrize("timeout", [1e10, 1e18, 1e300, 10**400])
def test_huge_timeout_is_no_timeout_at_all(timeout: float, client: Client) -> None:
    context_id = client.ingest("Some text.", timeout=timeout)
    assert client.ask(context_id, "Who?", timeout=timeout).result().text


def test_timeout_ends_an_answer(fake: FakeServer, client: Client, context_id: str) -> None:
    fake.service.hold_answer_after = 1
    with pytest.raises(errors.DeadlineExceeded):
        client.ask(context_id, "Who?", timeout=0.3).result()


def test_unknown_layout_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="layout"):
        client.ingest("text", layout="prose")  # type: ignore[arg-type]


def test_token_goes_with_every_call(fake: FakeServer) -> None:
    with Client(fake.address, token="t0ken") as client:
        client.ask(client.ingest("text"), "Who?").result()
        client.models()
    assert len(fake.service.headers) == 4
    assert {headers["authorization"] for headers in fake.service.headers} == {"Bearer t0ken"}


def test_token_never_travels_in_the_clear() -> None:
    with pytest.raises(ValueError, match="only sent over TLS"):
        Client("books.example:50051", token="t0ken")
    Client("books.example:50051", token="t0ken", tls=Tls()).close()


@pytest.mark.parametrize("token", ["", "two\nlines", "ü"])
def test_token_that_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        Client("localhost:1", token=token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("localhost:1", True),
        ("127.0.0.2:1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("unix:/run/openbook.sock", True),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
    ],
)
def test_loopback_is_recognised(address: str, is_here: bool) -> None:
    assert is_loopback(address) is is_here


def test_tls_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="given together"):
        Client("localhost:1", tls=Tls(certificate=tmp_path / "cert.pem"))
