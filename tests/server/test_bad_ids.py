"""Ids that name nothing, something elsewhere, or another's: no method does more than refuse them.

hostile     60 names that are none: paths, encodings of paths, control characters, look-alikes,
            other lengths; every method that takes a name answers NAME_INVALID
unknown     a right name of nothing, of another tenant's context, of a draft, of the trash:
            the same bytes for all of them, trailing metadata included
odd         a link, a pipe, a file, an empty folder in the place of a context at the start
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from openbook.v1 import contexts_pb2 as pb

from .bad_calls import NAMED, assert_sound, error_of, naming, raw_call
from .running import DOCUMENT, KeptLog, RunningServer, active, ask, refusal, text_of, until

ID = "0123456789abcdef" * 2
HOSTILE = (
    "", "/", ".", "..", "contexts", "contexts/", "contexts//", "contexts/.", "contexts/..",
    "contexts/../../etc/passwd", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd",
    "contexts//etc/passwd", "contexts/%2e%2e/secret", "contexts/..\\..\\secret", "contexts/~/x",
    "contexts/.tmp", "contexts/.tmp/x", f"contexts/.tmp/{ID}", f"contexts/.trash/{ID}",
    f"contexts/local/{ID}", f"contexts/other/{ID}", f"contexts/../local/{ID}", "contexts/secret",
    "contexts/uploads", "contexts/lock", "contexts/manifest.json", f"contexts/{ID}/manifest.json",
    f"contexts/{ID}/", f"contexts/{ID}/..", f"contexts//{ID}", f"contexts/./{ID}",
    f"/contexts/{ID}", ID, f"Contexts/{ID}",
    f"contexts\\{ID}", f"contexts/{ID}x", f"contexts/{ID[:-1]}",
    f"contexts/{ID}{ID}", f"contexts/{ID.upper()}", f"contexts/0x{ID[2:]}", f"contexts/{ID} ",
    f" contexts/{ID}", f"contexts/{ID}\n", f"contexts/{ID[:-1]}\n", f"contexts/{ID}\0",
    f"contexts/{ID[:-1]}\0", f"contexts/{ID[:16]}\0{ID[17:]}", f"contexts/\x1b[31m{ID[5:]}",
    f"contexts/\x1b]0;x\x07{ID[6:]}", f"contexts/{ID}\r", f"contexts/\u202e{ID[1:]}",
    "contexts/" + "\u0430" * 32, "contexts/" + "\u0661" * 32, "contexts/" + "\uff10" * 32,
    f"contexts/{ID[:-1]}\u200b", f"contexts/\ufeff{ID[1:]}", "contexts/\U0001f4d6",
    "contexts/" + "a" * 600, "x" * 10_240, "contexts/" + "../" * 3000 + "etc/passwd",
    "contexts/*", "contexts/$(id)", "contexts/' OR 1=1 --", "contexts/{{7*7}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = tmp_path_factory.mktemp("ids") / "data"
    data.mkdir(mode=0o700)
    running = RunningServer(data, KeptLog()).start()
    yield running
    running.stop()


def files_under(folder: Path) -> set[str]:
    """Return every name below a folder but Valkey's, which comes and goes."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {name for name in found if "valkey" not in name and not name.startswith("lives")}


def test_every_method_about_a_context_is_tried():
    assert set(NAMED) == {
        "WatchContext", "GetContext", "UpdateContext", "DeleteContext", "VerifyContext",
        "ReindexContext", "Ask",
    }  # fmt: skip
    assert len(HOSTILE) == len(set(HOSTILE)) >= 60


@pytest.mark.parametrize("method", NAMED)
def test_case_b35_sixty_hostile_names_are_refused_unread(server, method):
    context = active(server)
    until(lambda: not list((server.data / "uploads").iterdir()))  # just after it is ACTIVE
    before = files_under(server.data)
    for name in HOSTILE:
        call = getattr(server.stub, method)
        status, reason, details = refusal(lambda c=call, n=name: c(naming(method, n), timeout=10))
        assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NAME_INVALID"), repr(name)
        assert details == {}
    assert files_under(server.data) == before
    assert_sound(server, context.name)


def wire_of(error: grpc.RpcError) -> tuple[object, ...]:
    """Return all that a caller sees of a refusal: status, text, metadata before and after."""
    return (
        error.code(),
        error.details(),
        tuple(error.trailing_metadata()),
        tuple(error.initial_metadata()),
    )


@pytest.mark.parametrize("method", NAMED)
def test_another_s_context_and_one_that_is_nowhere_are_refused_by_the_same_bytes(server, method):
    context = active(server)
    mine = server.data / "contexts" / "local" / context.name.removeprefix("contexts/")
    ids = [f"{digit}" * 32 for digit in "0123"]
    for folder, context_id in zip(("other", ".tmp", ".trash"), ids, strict=False):
        shutil.copytree(mine, server.data / "contexts" / folder / context_id)
    try:
        seen = []
        for context_id in ids:
            request = naming(method, f"contexts/{context_id}").SerializeToString()
            call = raw_call(server, method)
            seen.append(wire_of(error_of(lambda c=call, r=request: c(r, timeout=10))))
    finally:
        for folder, context_id in zip(("other", ".tmp", ".trash"), ids, strict=False):
            shutil.rmtree(server.data / "contexts" / folder / context_id)
    assert len(set(seen)) == 1 and seen[0][0] == grpc.StatusCode.NOT_FOUND
    assert [key for key, _ in seen[0][2]] == ["grpc-status-details-bin"]
    assert context.name not in str(seen) and not any(one in str(seen) for one in ids)
    assert_sound(server, context.name)


@pytest.mark.parametrize("kind", ["link", "pipe", "file", "folder", "loop"])
def test_what_is_no_context_at_the_start_is_not_served_and_can_be_deleted(make_server, kind):
    first = make_server()
    context = active(first)
    first.stop()
    tenant = first.data / "contexts" / "local"
    elsewhere = first.data / "contexts" / "other" / ID
    shutil.copytree(tenant / context.name.removeprefix("contexts/"), elsewhere)
    odd = tenant / ID
    makers = {
        "link": lambda: odd.symlink_to(elsewhere),
        "loop": lambda: odd.symlink_to(odd),
        "pipe": lambda: os.mkfifo(odd),
        "file": lambda: odd.write_text("no context"),
        "folder": odd.mkdir,
    }
    makers[kind]()
    again = make_server()
    name = f"contexts/{ID}"
    for method in ("Ask", "VerifyContext"):
        call = getattr(again.stub, method)
        status, _, _ = refusal(lambda c=call, m=method: c(naming(m, name), timeout=10))
        assert status in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS)
    states = {c.name: c.state for c in again.stub.ListContexts(pb.ListContextsRequest()).contexts}
    assert states.pop(context.name) == pb.CONTEXT_STATE_ACTIVE
    assert set(states.values()) <= {pb.CONTEXT_STATE_FAILED}
    assert elsewhere.is_dir() and (elsewhere / "manifest.json").is_file()
    assert text_of(ask(again, context.name, max_tokens=1)) == "who-0 "
    if name in states:
        again.stub.DeleteContext(pb.DeleteContextRequest(name=name))
        assert not os.path.lexists(odd) and (elsewhere / "manifest.json").is_file()
    assert active(again, DOCUMENT).name == context.name
