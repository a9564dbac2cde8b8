"""Faults of TLS: a file that is none is named, and a server that is not trusted is told as such."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from openbook.client import Client, Tls, cli_verbs, errors

from .conftest import FakeServer

Made = tuple[Path, Path]  # a certificate and its key


def made(folder: Path) -> Made:
    """Return a new certificate for 127.0.0.1, which vouches for itself, and its key."""
    folder.mkdir()
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
        + ["-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Made, Made]:
    """Return two certificates and their keys."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificates with openssl")
    return made(tmp_path / "own"), made(tmp_path / "other")


@pytest.fixture
def fake(pairs: tuple[Made, Made], serve: Callable[..., FakeServer]) -> Iterator[FakeServer]:
    """Return a service over TLS, with the first certificate."""
    certificate, key = pairs[0]
    pair = (key.read_bytes(), certificate.read_bytes())
    yield serve(grpc.ssl_server_credentials([pair]))


def command(verb: str, fake: FakeServer, ca: Path | str) -> subprocess.CompletedProcess[str]:
    """Run a verb of the command line, as a process: gRPC has its own way to stderr."""
    given = {"OPENBOOK_SERVER": fake.address, "OPENBOOK_TLS_CA": str(ca)}
    return subprocess.run(
        [sys.executable, "-m", "openbook.client.cli", *verb.split()],
        env={k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"} | given,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_file_that_holds_no_certificate_is_named_before_any_call(
    pairs: tuple[Made, Made], tmp_path: Path
) -> None:
    (certificate, key), _ = pairs
    content = certificate.read_bytes()
    odd = tmp_path / "odd.pem"
    for wrong in (b"", b"no PEM\n", b"\xff\xfe", content[:300], content + content[:300],
                  key.read_bytes()):  # fmt: skip
        odd.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"^tls: {odd} is no PEM file of certificates"):
            Tls(ca=odd).credentials()
    odd.write_bytes("# Autorit\u00e9\n".encode() + content + content)
    assert isinstance(Tls(ca=odd).credentials(), grpc.ChannelCredentials)


def test_own_certificate_that_is_not_its_keys_is_refused_before_any_call(
    pairs: tuple[Made, Made], tmp_path: Path
) -> None:
    (certificate, key), (_, other_key) = pairs
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:word", "-in", key, "-out", locked],
        check=True,
        capture_output=True,
        timeout=60,
    )
    for wrong in (other_key, locked, certificate):
        with pytest.raises(ValueError, match=f"{wrong} must be a PEM certificate and its"):
            Client("localhost:1", tls=Tls(certificate=certificate, key=wrong))
    whole = Tls(certificate=certificate, key=key).credentials()
    assert isinstance(whole, grpc.ChannelCredentials)


def test_server_that_is_not_vouched_for_is_one_line_about_certificates(
    fake: FakeServer, pairs: tuple[Made, Made]
) -> None:
    (certificate, _), (stranger, _) = pairs
    for ca in (stranger, "system"):
        done = command("contexts list", fake, ca)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"openbook: no server answers at {fake.address}; see that it uses TLS, that "
            "OPENBOOK_TLS_CA vouches for its certificate and that this names the host of "
            f"{fake.address}; or start one with `openbook serve`\n"
        )
    told = command("doctor", fake, stranger)
    assert (told.returncode, told.stderr) == (1, "")
    assert "that OPENBOOK_TLS_CA vouches for its certificate" in told.stdout
    plain = command("contexts list", fake, "")
    assert plain.stderr.endswith("or set OPENBOOK_TLS_CA where it uses TLS\n")
    assert plain.stderr.count("\n") == 1
    assert command("contexts list", fake, certificate).returncode == 0


def test_file_that_is_no_certificate_is_one_line_and_exit_2(
    fake: FakeServer, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    done = command("contexts list", fake, empty)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"openbook: tls: {empty} is no PEM file of certificates, or is damaged\n"
    assert done.stderr == said


def test_a_file_may_be_named_by_a_str_as_well(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.pem")
    with pytest.raises(FileNotFoundError):
        Tls(ca=absent).credentials()
    with pytest.raises(FileNotFoundError):
        Tls(certificate=absent, key=absent).credentials()


def test_tls_checks_the_servers_certificate(fake: FakeServer, pairs: tuple[Made, Made]) -> None:
    (certificate, _), _ = pairs
    with Client(fake.address, token="t0ken", tls=Tls(ca=certificate)) as client:
        assert client.models()
    with Client(fake.address, tls=Tls()) as stranger, pytest.raises(errors.Unavailable):
        stranger.models()


def test_the_command_line_reaches_a_server_over_tls(
    fake: FakeServer, pairs: tuple[Made, Made]
) -> None:
    (certificate, _), _ = pairs
    shell = {"OPENBOOK_SERVER": fake.address, "OPENBOOK_TOKEN": "t0ken"}

    def run(verb: str, ca: str) -> Result:
        return CliRunner().invoke(cli_verbs.app, verb.split(), env={**shell, "OPENBOOK_TLS_CA": ca})

    for verb in ("doctor", "contexts list", f"count {certificate}"):
        assert run(verb, str(certificate)).exit_code == 0, run(verb, str(certificate)).output
    for ca in ("", "system"):
        assert "no server answers" in run("contexts list", ca).stderr
    absent = run("contexts list", str(certificate.with_name("absent")))
    assert (absent.exit_code, absent.stderr.count("\n")) == (2, 1)
