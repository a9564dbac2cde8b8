"""An upload is whole, private and found again, or it leaves nothing."""

import errno
import os
from hashlib import sha256

import pytest

from openbook.indexstore.errors import StoreWriteFailed
from openbook.server import directory
from openbook.server.documents import Documents, Upload
from openbook.server.errors import DocumentOversized, StorageFull, UploadCorrupt

ID = "a" * 32
OTHER = "b" * 32


def record(context_id=ID, document=b"text", **changes):
    fields = {
        "context_id": context_id,
        "layout": "chat",
        "sha256": sha256(document).hexdigest(),
        "bytes": len(document),
        "received_unix_s": 1.0,
    }
    return Upload(**{**fields, **changes})


def keep(documents, document=b"text", name="", **changes):
    receiving = documents.receive()
    receiving.write(document)
    assert receiving.finish() == sha256(document).digest()
    upload = record(document=document, **changes)
    documents.keep(receiving, upload, display_name=name)
    return upload


def test_a_kept_upload_is_found_after_a_restart_with_private_files(data):
    upload = keep(Documents(data, bytes_max=10), name="Light")
    again = Documents(data, bytes_max=10)
    assert again.pending() == [upload] and again.find(ID) == upload
    assert again.read(upload) == b"text" and again.display_name(ID) == "Light"
    modes = {path.stat().st_mode & 0o777 for path in data.rglob("*") if path.is_file()}
    assert modes == {0o600}


def test_pending_uploads_come_oldest_first(data):
    documents = Documents(data, bytes_max=10)
    keep(documents, context_id=ID, received_unix_s=2.0)
    keep(documents, context_id=OTHER, received_unix_s=1.0)
    assert [upload.context_id for upload in documents.pending()] == [OTHER, ID]


def test_an_upload_stops_at_the_limit_and_is_discarded(data):
    documents = Documents(data, bytes_max=4)
    receiving = documents.receive()
    receiving.write(b"four")
    with pytest.raises(DocumentOversized):
        receiving.write(b"!")
    receiving.discard()
    receiving.discard()
    assert list((data / "uploads").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EIO, StoreWriteFailed),
     (errno.EROFS, StoreWriteFailed), (errno.EMFILE, StoreWriteFailed),
     (errno.EACCES, OSError)],
)  # fmt: skip
def test_what_the_disk_does_is_named_and_discarding_still_works(
    data, monkeypatch, number, expected
):
    receiving = Documents(data, bytes_max=10).receive()

    def full(_):
        raise OSError(number, os.strerror(number))

    receiving.write(b"text")
    monkeypatch.setattr(os, "fsync", full)
    receiving.finish()
    with pytest.raises(expected):
        receiving.sync()
    receiving.discard()
    assert list((data / "uploads").iterdir()) == []


@pytest.mark.parametrize("write", [1, 2])  # the name, the record
def test_a_document_that_cannot_be_kept_leaves_nothing(data, monkeypatch, write):
    documents = Documents(data, bytes_max=10)
    writes = iter(range(1, 9))
    whole = directory.write_whole

    def fail(path, content):
        if next(writes) == write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(path, content)

    monkeypatch.setattr("openbook.server.documents.write_whole", fail)
    receiving = documents.receive()
    receiving.finish()
    with pytest.raises(StorageFull):
        documents.keep(receiving, record(), display_name="Light")
    receiving.discard()
    assert [path for path in data.rglob("*") if path.is_file()] == []


def test_an_attempt_or_failure_that_cannot_be_noted_leaves_no_record_without_reason(
    data, monkeypatch
):
    documents = Documents(data, bytes_max=10)
    upload = keep(documents)

    def fail(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("openbook.server.documents.write_whole", fail)
    with pytest.raises(StorageFull):
        documents.count_attempts(upload, 1)
    documents.fail(upload, reason="STORE_FULL", text="the server's disk is full")
    assert list((data / "uploads").iterdir()) == []


def test_a_damaged_upload_is_not_read(data):
    documents = Documents(data, bytes_max=10)
    upload = keep(documents)
    (data / "uploads" / f"{ID}.doc").write_bytes(b"texT")
    with pytest.raises(UploadCorrupt):
        documents.read(upload)
    (data / "uploads" / f"{ID}.doc").unlink()
    with pytest.raises(UploadCorrupt):
        documents.read(upload)


def test_a_failed_upload_keeps_its_reason_and_not_its_text(data):
    documents = Documents(data, bytes_max=10)
    documents.fail(keep(documents), reason="DOCUMENT_EMPTY", text="empty")
    (failed,) = Documents(data, bytes_max=10).failed()
    assert (failed.error_reason, failed.error_text) == ("DOCUMENT_EMPTY", "empty")
    assert documents.pending() == [] and documents.find(ID) is None
    assert not (data / "uploads" / f"{ID}.doc").exists()


def test_attempts_are_counted_on_disk(data):
    documents = Documents(data, bytes_max=10)
    documents.count_attempts(keep(documents), 2)
    assert Documents(data, bytes_max=10).pending()[0].attempts == 2


def test_names_of_contexts_that_are_gone_are_swept(data):
    documents = Documents(data, bytes_max=10)
    documents.name(ID, "Light")
    documents.name(OTHER, "Dark")
    (data / "labels" / "0123.part").write_text("half")
    assert documents.sweep_names({ID}) == 2
    assert [path.name for path in (data / "labels").iterdir()] == [ID]


def test_sweep_removes_what_makes_no_sense_and_keeps_the_rest(data):
    documents = Documents(data, bytes_max=10)
    upload = keep(documents)
    uploads = data / "uploads"
    (uploads / "0123.part").write_bytes(b"under way when we were killed")
    (uploads / f"{OTHER}.doc").write_bytes(b"no record")
    (uploads / ("c" * 32 + ".json")).write_text(record("c" * 32).model_dump_json())
    (uploads / ("d" * 32 + ".json")).write_text('{"context_id": "x"}')
    (uploads / ("e" * 32 + ".json")).write_text(record(ID).model_dump_json())
    (uploads / "..json").write_text("")
    assert documents.sweep() == 6
    assert documents.pending() == [upload]
    assert sorted(path.suffix for path in uploads.iterdir()) == [".doc", ".json"]


def test_odd_things_among_uploads_and_names_are_swept_and_not_waited_for(data):
    documents = Documents(data, bytes_max=10)
    upload = keep(documents, name="Light")
    uploads, labels = data / "uploads", data / "labels"
    os.mkfifo(uploads / f"{OTHER}.json")
    (uploads / "folder" / "below").mkdir(parents=True)
    (uploads / "x.part").mkdir()
    (uploads / ("c" * 32 + ".json")).mkdir()
    (uploads / ("d" * 32 + ".doc")).symlink_to(data / "secret")
    (labels / OTHER).mkdir()
    os.mkfifo(labels / ("c" * 32))
    assert documents.pending() == [upload] and documents.find(OTHER) is None
    assert documents.sweep() == 5 and documents.sweep_names({ID, OTHER, "c" * 32}) == 2
    assert sorted(path.name for path in uploads.iterdir()) == [f"{ID}.doc", f"{ID}.json"]
    assert documents.display_name(ID) == "Light" and documents.display_name(OTHER) == ""


def test_a_name_that_nobody_could_have_given_is_not_shown(data):
    documents = Documents(data, bytes_max=10)
    (data / "labels" / ID).write_bytes(b"x" * (5 << 20))
    (data / "labels" / OTHER).write_bytes(b"\xff")
    assert documents.display_name(ID) == documents.display_name(OTHER) == ""


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "1e300", "-1"])
def test_a_record_of_no_time_is_none(data, seconds):
    documents = Documents(data, bytes_max=10)
    keep(documents)
    path = data / "uploads" / f"{ID}.json"
    path.write_text(
        path.read_text().replace('"received_unix_s":1.0', f'"received_unix_s":{seconds}')
    )
    assert seconds in path.read_text() and documents.pending() == []


def test_a_document_longer_than_its_record_says_is_not_read(data):
    documents = Documents(data, bytes_max=10)
    upload = keep(documents)
    (data / "uploads" / f"{ID}.doc").write_bytes(b"x" * 1000)
    with pytest.raises(UploadCorrupt):
        documents.read(upload)
