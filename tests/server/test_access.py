"""Who has not shown the token reaches nothing, and a secret that is not secret is refused."""

import asyncio
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.server import app as server_app
from openbook.server.access import AccessRefused, load_certificate, load_tokens
from openbook.server.errors import Unauthenticated
from openbook.server.gate import Gate
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .running import UNKNOWN, refusal, upload

TOKEN = b"0123456789abcdef0123456789abcdef"
SHOWN = (("authorization", "Bearer " + TOKEN.decode()),)
REQUESTS = {
    "WatchContext": pb.WatchContextRequest(name=UNKNOWN),
    "GetContext": pb.GetContextRequest(name=UNKNOWN),
    "ListContexts": pb.ListContextsRequest(),
    "UpdateContext": pb.UpdateContextRequest(name=UNKNOWN),
    "DeleteContext": pb.DeleteContextRequest(name=UNKNOWN),
    "VerifyContext": pb.VerifyContextRequest(name=UNKNOWN),
    "ReindexContext": pb.ReindexContextRequest(name=UNKNOWN),
    "Ask": pb.AskRequest(context=UNKNOWN, question="q"),
    "ListModels": pb.ListModelsRequest(),
    "CountTokens": pb.CountTokensRequest(document=b"x"),
}


@pytest.fixture
def guarded(make_server):
    server = make_server()
    server.app.service.gate = Gate([TOKEN])
    return server


@pytest.mark.parametrize(
    "method", [m.name for m in pb.DESCRIPTOR.services_by_name["ContextService"].methods]
)
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer " + TOKEN.decode()[:-1]),),
        (("authorization", TOKEN.decode()),),
        (("authorization", ""),),
        (*SHOWN, ("authorization", "Bearer other")),
        (("authorization-bin", b"Bearer " + TOKEN),),
    ],
)
def test_every_method_wants_the_token(guarded, method, metadata):
    given = upload() if method == "IngestContext" else REQUESTS[method]
    call = getattr(guarded.stub, method)
    status, reason, details = refusal(lambda: call(given, metadata=metadata, timeout=10))
    assert (status, reason, details) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", {})
    assert not list((guarded.data / "uploads").iterdir())


def test_with_the_token_calls_are_served_and_health_needs_none(guarded):
    assert guarded.stub.ListModels(pb.ListModelsRequest(), metadata=SHOWN).models
    health = health_pb2_grpc.HealthStub(guarded.channel)
    answer = health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_without_a_token_everybody_is_let_in():
    assert Gate(()).check(None, peer="who") == "who"
    with pytest.raises(Unauthenticated):
        Gate([TOKEN]).check(None, peer="who")


@pytest.mark.parametrize(
    "content", [b"", b"short", b"a" * 513, b"a" * 40 + b" " + b"b", b"\xc3\xa9" * 20]
)
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(AccessRefused) as refused:
        load_tokens(path)
    assert content.decode("utf-8") not in str(refused.value) or not content


def test_a_secret_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o644)
    with pytest.raises(AccessRefused, match="chmod 600"):
        load_tokens(path)
    path.chmod(0o600)
    assert load_tokens(path) == (TOKEN,)
    for odd in (tmp_path / "absent", tmp_path):
        with pytest.raises(AccessRefused):
            load_tokens(odd)


def test_a_file_may_hold_several_tokens_and_each_is_a_caller(tmp_path):
    path = tmp_path / "tokens"
    other = TOKEN[::-1]
    path.write_bytes(b"\n" + TOKEN + b"  \r\n\n" + other + b"\n")
    path.chmod(0o600)
    gate = Gate(load_tokens(path))
    given = [(("authorization", "Bearer " + token.decode()),) for token in (TOKEN, other)]
    callers = [gate.check(metadata, peer="where") for metadata in given]
    assert callers == ["token 0", "token 1"]
    assert Gate([TOKEN]).check(given[0], peer="where") == "where"
    with pytest.raises(Unauthenticated):
        gate.check((("authorization", "Bearer " + "c" * 32),), peer="where")


@pytest.mark.parametrize(
    "content", [TOKEN + b"\nshort\n", TOKEN + b"\n" + TOKEN, b"\n \n", b"a" * 32 + b"\xff"]
)
def test_a_token_file_with_one_wrong_line_is_refused_whole(tmp_path, content):
    path = tmp_path / "tokens"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(AccessRefused) as refused:
        load_tokens(path)
    assert TOKEN.decode() not in str(refused.value) and "short" not in str(refused.value)


def certificate_and_key(folder: Path) -> tuple[Path, Path]:
    """Make a folder with a certificate for 127.0.0.1 and its key, and return both."""
    folder.mkdir()
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    key.chmod(0o600)
    return certificate, key


def test_a_certificate_and_a_key_that_do_not_go_together_are_refused_at_once(tmp_path):
    certificate, key = certificate_and_key(tmp_path / "own")
    _, other_key = certificate_and_key(tmp_path / "other")
    cut, cut_key, chain, locked = (tmp_path / name for name in ("cut", "cut_key", "chain", "lock"))
    cut.write_bytes(certificate.read_bytes()[:400])
    chain.write_bytes(certificate.read_bytes() + cut.read_bytes())
    cut_key.write_bytes(key.read_bytes()[:100])
    encrypt = ["openssl", "ec", "-aes128", "-passout", "pass:word"]
    subprocess.run(
        [*encrypt, "-in", str(key), "-out", str(locked)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    for secret in (cut_key, locked):
        secret.chmod(0o600)
    pairs = [(certificate, other_key), (certificate, cut_key), (certificate, locked)]
    for pair in [*pairs, (cut, key), (chain, key)]:
        with pytest.raises(AccessRefused, match="cannot serve as a pair: ") as said:
            load_certificate(*pair)
        assert "\n" not in str(said.value)
    with pytest.raises(AccessRefused, match="key values mismatch"):
        load_certificate(certificate, other_key)
    link = tmp_path / "link"  # as a mounted secret is
    link.symlink_to(key)
    assert load_certificate(certificate, link) == (key.read_bytes(), certificate.read_bytes())


def test_a_server_with_a_certificate_answers_over_tls(tmp_path):
    certificate, key = certificate_and_key(tmp_path / "tls")
    key.chmod(0o640)
    loaded = load_certificate(certificate, key)
    key.chmod(0o644)
    with pytest.raises(AccessRefused, match="chmod 600"):
        load_certificate(certificate, key)
    key.chmod(0o600)
    with pytest.raises(AccessRefused, match="PEM"):
        load_certificate(key, key)

    async def serve_and_shake_hands() -> str:
        server = server_app.new_server()
        address = server_app.bind(server, "127.0.0.1:0", loaded)
        await server.start()
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        try:
            async with grpc.aio.secure_channel(address, trusted) as channel:
                await channel.channel_ready()
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await rpcs.ContextServiceStub(channel).ListModels(
                        pb.ListModelsRequest(), timeout=2
                    )
        finally:
            await server.stop(0)
        return address

    assert asyncio.run(asyncio.wait_for(serve_and_shake_hands(), 30))
