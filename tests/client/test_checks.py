"""`openbook doctor` and `capacity`: what is looked at, computed and advised."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from openbook.client import Client, cli_verbs, doctor
from openbook.client.capacity import capacity
from openbook.client.cli_options import read_size

from .conftest import LAYERS, FakeServer, Refusal


@pytest.fixture
def openbook(fake: FakeServer) -> Callable[..., Result]:
    """Run a verb against the fake."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli_verbs.app, arguments, env={"OPENBOOK_SERVER": fake.address})

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a directory as the server makes it."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    return folder


def test_doctor_finds_all_in_order(openbook: Callable[..., Result], data: Path) -> None:
    done = openbook("doctor", "--data", str(data))
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"ok"}, done.stdout
    subjects = [line.split(maxsplit=1)[1].partition(":")[0] for line in lines]
    service = ["versions", "service", "health", "model", "round trip"]
    assert subjects[:8] == [*service, "data", "disk", "files"]
    assert re.search(r"^ok round trip: [\d.]+ ms$", done.stdout, re.MULTILINE)
    assert (done.exit_code, done.stderr) == (0, "")


def test_doctor_says_what_to_do_where_nobody_answers() -> None:
    done = CliRunner().invoke(cli_verbs.app, ["doctor", "--server", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "fail service: no server answers at that address; start one with" in done.stdout


def test_doctor_fails_where_the_service_is_not_serving(
    openbook: Callable[..., Result], fake: FakeServer
) -> None:
    fake.health.answer = b"\x08\x02"
    done = openbook("doctor")
    assert done.exit_code == 1 and "fail health: not serving; it starts, stops" in done.stdout


def test_doctor_shows_a_refusal_in_one_line(
    openbook: Callable[..., Result], fake: FakeServer
) -> None:
    refusal = Refusal(grpc.StatusCode.PERMISSION_DENIED, "NEW", "not\nyours")
    fake.service.refuse("ListModels", refusal)
    done = openbook("doctor")
    assert done.exit_code == 1 and "fail service: not yours; " in done.stdout


def test_doctor_looks_at_the_data_directory(
    openbook: Callable[..., Result], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.chmod(0o755)
    monkeypatch.setattr(doctor, "FREE_BYTES_MIN", 1 << 62)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    done = openbook("doctor", "--data", str(data))
    assert done.exit_code == 1
    assert "fail data: mode 0755; chmod 0700 the directory" in done.stdout
    assert re.search(r"^fail disk: .* GiB are free; delete contexts", done.stdout, re.MULTILINE)
    needed = doctor.FILES_BESIDE + doctor.CONTEXTS_OPEN * (LAYERS + 1)
    assert f"need {needed}; `ulimit -n {needed}`" in done.stdout
    missing = openbook("doctor", "--data", str(data / "missing"))
    assert "fail data: is no directory; `openbook serve --data` makes it" in missing.stdout


def test_doctor_names_the_vector_instructions(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f sse2\n")
    assert [str(found) for found in doctor.processor(cpuinfo)] == ["ok processor: avx2, avx512f"]
    cpuinfo.write_text("flags : fpu\n")
    (plain,) = doctor.processor(cpuinfo)
    assert plain.is_ok and "the portable kernels are used" in plain.found
    assert list(doctor.processor(tmp_path / "missing")) == []


def test_capacity_is_the_shape_times_the_tokens(client: Client) -> None:
    (model,) = client.models()
    found = capacity(model, 1000, memory_bytes=5_990_400, disk_bytes=5_990_399)
    token_bytes = 2 * 2 * LAYERS * 3 * 64  # key and value, 16 bit, of each layer and KV head
    assert (found.kv_bytes, found.stored_bytes) == (1000 * token_bytes, 1300 * token_bytes)
    assert (found.fit_in_memory, found.fit_on_disk) == (2, 1)
    assert client.count_tokens("word " * 1000).kv_bytes == found.kv_bytes
    for tokens in (0, -1, 8193):
        with pytest.raises(ValueError, match=f"tokens is {tokens}; the model takes 1 to 8192"):
            capacity(model, tokens)
    for room in ({"memory_bytes": -1}, {"disk_bytes": -1}):
        with pytest.raises(ValueError, match="negative"):
            capacity(model, 1000, **room)


def test_capacity_is_printed(openbook: Callable[..., Result]) -> None:
    done = openbook("capacity", "--tokens", "1000", "--memory", "16GiB", "--disk", "1TB")
    assert re.search(r"^keys and values, 16 bit +2\.3 MB$", done.stdout, re.MULTILINE)
    assert re.search(r"^contexts in 16GiB of memory +5735 \(rounded down\)$", done.stdout, re.M)
    assert re.search(r"^contexts on 1TB of disk +333867 \(rounded down\)$", done.stdout, re.M)
    found = json.loads(openbook("capacity", "--tokens", "1000", "--json").stdout)
    assert (found["kv_bytes"], found["fit_on_disk"]) == (2_304_000, None)
    assert openbook("capacity", "--tokens", "9000").exit_code == 2


def test_sizes_are_read() -> None:
    given = ["16GiB", "500 GB", "1.5kB", "77", "2MiB"]
    assert [read_size(text, "--disk") for text in given] == [
        *(16 << 30, 500 * 10**9, 1500, 77, 2 << 20)
    ]
    for wrong in ("", "GiB", "-1GB", "16gib", "1e9"):
        with pytest.raises(ValueError, match="--disk is a size such as"):
            read_size(wrong, "--disk")
