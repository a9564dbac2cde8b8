"""A secret is private and never replaced; ids are stable and say nothing."""

import os
import subprocess
import sys
from hashlib import sha256

import pytest

from openbook.server.directory import DataDirectoryRefused, open_data_directory
from openbook.server.identity import context_id_of, load_secret

DIGEST = sha256(b"document").digest()


def make_id(secret=b"s" * 32, fingerprint="model", layout="chat", digest=DIGEST):
    return context_id_of(
        secret, model_fingerprint=fingerprint, layout=layout, document_sha256=digest
    )


def test_a_new_data_directory_and_its_secret_are_private(tmp_path):
    with open_data_directory(tmp_path / "a" / "data"):
        first = load_secret(tmp_path / "a" / "data")
    assert (tmp_path / "a" / "data").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "data" / "secret").stat().st_mode & 0o777 == 0o600
    assert load_secret(tmp_path / "a" / "data") == first and len(first) == 32


def test_a_secret_open_to_others_or_cut_short_is_refused(data):
    load_secret(data)
    (data / "secret").chmod(0o644)
    with pytest.raises(DataDirectoryRefused, match="open to other users"):
        load_secret(data)
    (data / "secret").chmod(0o600)
    (data / "secret").write_bytes(b"short")
    with pytest.raises(DataDirectoryRefused, match="32 bytes"):
        load_secret(data)


def test_a_secret_that_cannot_be_read_or_made_is_refused_in_one_line(data):
    (data / "secret.new").mkdir()
    with pytest.raises(DataDirectoryRefused, match="cannot be read or made"):
        load_secret(data)
    (data / "secret").mkdir()
    with pytest.raises(DataDirectoryRefused, match="not a regular file"):
        load_secret(data)


@pytest.mark.parametrize("name", ["contexts/local/" + "a" * 32, "uploads/" + "a" * 32 + ".json"])
def test_a_lost_secret_is_not_replaced_while_its_contexts_are_there(data, name):
    (data / name).parent.mkdir(parents=True)
    (data / name).mkdir()
    with pytest.raises(DataDirectoryRefused, match="is missing, but"):
        load_secret(data)
    assert not (data / "secret").exists()


def test_an_id_depends_on_secret_model_layout_and_document_alone():
    ids = {
        make_id(),
        make_id(secret=b"t" * 32),
        make_id(fingerprint="other"),
        make_id(layout="completion"),
        make_id(digest=sha256(b"document ").digest()),
    }
    assert len(ids) == 5 and make_id() == make_id()


def test_an_id_does_not_confuse_neighbouring_parts():
    assert make_id(fingerprint="ab", layout="c") != make_id(fingerprint="a", layout="bc")


def test_case_b26_an_id_is_the_same_in_every_process():
    program = (
        "from hashlib import sha256; from openbook.server.identity import context_id_of\n"
        "print(context_id_of(b's' * 32, model_fingerprint='model', layout='chat',"
        " document_sha256=sha256(b'document').digest()))"
    )
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == make_id()
