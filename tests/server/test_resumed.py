"""A document whose reading a stop cut short is read on from what its draft has."""

import threading

import pytest

from openbook import worker
from openbook.v1 import contexts_pb2 as pb

from . import running
from .fakes import FakeReading, _fields, _window_only
from .running import ask, ingest, settle, text_of, until


class SavingReading(FakeReading):
    """Saves after its first layer, waits there, and goes on from there."""

    saved = threading.Event()

    def __call__(self, model, document, draft, **given):
        """Read a context of one token per byte."""
        if draft.checkpoint is None:
            whole = super().__call__
            return self._first(model, document, draft, whole, **given)
        self.calls.append(given["context_id"])
        for layer in range(draft.checkpoint.state["layers"], 2):
            draft.write_layer(layer, _window_only(len(document)))
        created = given["created_unix_s"]
        fields = _fields(
            model, given["context_id"], given["settings"], tokens=len(document), created=created
        )
        return draft.seal(fields)

    def _first(self, model, document, draft, whole, *, is_cancelled, **given):
        layers = 0

        def cancelled():
            nonlocal layers
            if layers == 0:
                layers = 1
                draft.write_layer(0, _window_only(len(document)))
                draft.save(given["context_id"], {"layers": 1}, memoryview(b"hidden"))
                self.saved.set()
            return is_cancelled()

        self.gate.clear()
        with pytest.raises(worker.IngestCancelled):
            whole(model, document, draft, is_cancelled=cancelled, **given)
        raise worker.IngestCancelled()


@pytest.fixture
def saving(monkeypatch):
    SavingReading.saved = threading.Event()
    monkeypatch.setattr(running, "FakeReading", SavingReading)


def drafts(server):
    return list((server.data / "contexts" / ".tmp").iterdir())


def test_a_reading_that_a_stop_cut_short_is_gone_on_with(make_server, saving):
    server = make_server()
    context = ingest(server)
    assert server.reading.saved.wait(10)
    server.stop()
    (left,) = drafts(server)
    assert (left / "checkpoint.json").is_file()
    again = make_server()
    assert settle(again, context.name).state == pb.CONTEXT_STATE_ACTIVE
    resumed = [fields for _, name, fields in again.log.events if name == "ingest_resumed"]
    assert [fields["layers_done"] for fields in resumed] == [1]
    assert text_of(ask(again, context.name, max_tokens=1)) == "who-0 "
    assert drafts(again) == []


def test_a_deleted_document_leaves_no_draft(make_server, saving):
    server = make_server()
    context = ingest(server)
    assert server.reading.saved.wait(10)
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    until(lambda: drafts(server) == [])


def test_a_draft_whose_document_is_gone_is_swept(make_server, saving):
    server = make_server()
    context = ingest(server)
    assert server.reading.saved.wait(10)
    server.stop()
    context_id = context.name.removeprefix("contexts/")
    (server.data / "uploads" / f"{context_id}.doc").unlink()
    again = make_server()
    assert drafts(again) == []
