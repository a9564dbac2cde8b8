"""A damaged context is refused before its first token, whatever was open, and can be healed."""

import os
import shutil

import grpc
import pytest

from openbook.server import opened
from openbook.v1 import contexts_pb2 as pb

from .running import active, ask, refusal, text_of, until


def directory(server, context):
    return server.data / "contexts" / "local" / context.name.removeprefix("contexts/")


def flip(path, offset=None):
    """Flip a bit of the byte in the middle of a file, in place."""
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    path.write_bytes(content)


FILES = ["manifest.json", "tokens.mdb", "layer-000.mdb", "layer-001.mdb"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("was_open", [False, True])
def test_a_flipped_bit_in_any_file_is_refused_and_the_others_answer(server, file, was_open):
    context, other = active(server), active(server, b"another")
    if was_open:
        list(ask(server, context.name, max_tokens=1))
    flip(directory(server, context) / file)
    for _ in range(2):
        status, reason, _ = refusal(lambda: ask(server, context.name))
        assert (status, reason) == (grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT")
    assert text_of(ask(server, other.name, max_tokens=1)) == "who-0 "
    assert active(server).name == context.name  # read anew, not adopted
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_short_is_refused(server, file):
    context = active(server)
    path = directory(server, context) / file
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size // 2)
    status, reason, _ = refusal(lambda: ask(server, context.name))
    assert status == grpc.StatusCode.DATA_LOSS
    assert reason in ("CONTEXT_TRUNCATED", "CONTEXT_CORRUPT")


def test_a_directory_that_is_gone_is_refused_and_healed(server):
    context = active(server)
    list(ask(server, context.name, max_tokens=1))
    shutil.rmtree(directory(server, context))
    assert refusal(lambda: ask(server, context.name))[:2] == (
        grpc.StatusCode.DATA_LOSS, "CONTEXT_MISSING",
    )  # fmt: skip
    assert active(server).name == context.name


def test_a_manifest_of_another_context_is_refused(server):
    context, other = active(server), active(server, b"another")
    path = directory(server, context) / "manifest.json"
    path.unlink()
    shutil.copy(directory(server, other) / "manifest.json", path)
    status, _, _ = refusal(lambda: ask(server, context.name))
    assert status in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DATA_LOSS)
    assert text_of(ask(server, other.name, max_tokens=1)) == "who-0 "


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_manifest_that_is_no_file_is_refused_and_healed(server, make):
    context = active(server)
    path = directory(server, context) / "manifest.json"
    path.unlink()
    make(path)
    assert refusal(lambda: ask(server, context.name))[0] == grpc.StatusCode.DATA_LOSS
    assert active(server).name == context.name


def test_damage_found_at_start_is_listed_as_failed(make_server):
    server = make_server()
    context, other = active(server), active(server, b"another")
    server.stop()
    flip(directory(server, context) / "manifest.json")
    again = make_server()
    states = {c.name: c.state for c in again.stub.ListContexts(pb.ListContextsRequest()).contexts}
    assert states == {
        context.name: pb.CONTEXT_STATE_FAILED,
        other.name: pb.CONTEXT_STATE_ACTIVE,
    }
    assert refusal(lambda: ask(again, context.name))[0] == grpc.StatusCode.DATA_LOSS
    assert active(again).name == context.name


def test_damage_under_a_running_answer_refuses_the_next_one_only(server):
    context = active(server)
    server.engine.gate.clear()
    running = ask(server, context.name, max_tokens=3)
    until(lambda: server.engine.asks)
    flip(directory(server, context) / "layer-001.mdb")
    assert refusal(lambda: ask(server, context.name))[0] == grpc.StatusCode.DATA_LOSS
    server.engine.gate.set()
    assert text_of(running) == "who-0 who-1 who-2 "


def test_files_only_touched_are_verified_and_served(server):
    context = active(server)
    list(ask(server, context.name, max_tokens=1))
    os.utime(directory(server, context) / "layer-000.mdb")
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert server.engine.loads == 2


def test_an_open_context_is_not_opened_again_for_each_ask(server):
    context = active(server)
    for _ in range(3):
        list(ask(server, context.name, max_tokens=1))
    assert server.engine.loads == 1


def test_a_caller_that_leaves_during_the_open_leaks_no_claim(server):
    context = active(server)
    server.engine.open_gate.clear()
    answer = ask(server, context.name)
    until(lambda: server.app.decode.asks_running == 1)
    answer.cancel()
    until(lambda: server.app.decode.asks_running == 0)
    server.engine.open_gate.set()
    request = pb.DeleteContextRequest(name=context.name)

    def deleted():
        try:
            server.stub.DeleteContext(request)
        except grpc.RpcError:
            return False
        return True

    until(deleted)  # a leaked claim would hold the lock on the files for ever


def test_open_contexts_leave_descriptors_for_the_rest(server):
    """Idle ones make room; when asks use all places, one more is refused."""
    assert opened.contexts_max(1024, layers=30) == 31
    assert opened.contexts_max(20, layers=30) == 1
    server.app.opened._contexts_max = 2
    contexts = [active(server, b"number %d" % n) for n in range(3)]
    for context in contexts:
        assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert server.engine.loads == 3
    assert sum(holders[0] > 0 for _, holders in server.engine._live.values()) == 2
    server.engine.gate.clear()
    running = [ask(server, context.name, max_tokens=1) for context in contexts[:2]]
    until(lambda: len(server.engine.asks) == 5)
    status, reason, details = refusal(lambda: ask(server, contexts[2].name))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OPENED_FULL")
    assert details == {"limit": "2"}
    server.engine.gate.set()
    assert [text_of(each) for each in running] == ["who-0 "] * 2
    assert text_of(ask(server, contexts[2].name, max_tokens=1)) == "who-0 "
