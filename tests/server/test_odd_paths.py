"""What is put in the place of a context is set aside, and what it names is left alone."""

import os
import shutil

import pytest

from openbook.v1 import contexts_pb2 as pb

from .running import active, ask, refusal, text_of


def put(kind, path):
    """Replace the context at `path` by something of another kind."""
    if path.exists():
        shutil.rmtree(path)
    if kind == "file":
        path.write_text("no context")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        elsewhere = path.parents[3] / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "kept").write_text("not ours")
        path.symlink_to(elsewhere)


def place_of(server, context):
    return server.data / "contexts" / "local" / context.name.removeprefix("contexts/")


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "folder"])
def test_a_document_whose_context_was_replaced_is_read_anew(server, kind):
    context = active(server)
    path = place_of(server, context)
    put(kind, path)
    assert refusal(lambda: ask(server, context.name))[1] in (
        "CONTEXT_MISSING",
        "CONTEXT_INCOMPLETE",
    )
    assert active(server).name == context.name
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert path.is_dir() and not path.is_symlink()
    if kind == "link":
        assert (server.data.parent / "elsewhere" / "kept").read_text() == "not ours"


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "folder"])
def test_a_deleted_context_leaves_nothing_in_its_place(server, kind):
    context = active(server)
    put(kind, place_of(server, context))
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    assert not os.path.lexists(place_of(server, context))
    if kind == "link":
        assert (server.data.parent / "elsewhere" / "kept").read_text() == "not ours"
