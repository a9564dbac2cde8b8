"""A data directory is private, has one owner, and holds only what a server writes."""

import os
import socket

import pytest

from openbook.indexstore.draft import TMP_NAME
from openbook.indexstore.store import TRASH_NAME
from openbook.server.directory import (
    FILES,
    FOLDERS,
    DataDirectoryRefused,
    open_data_directory,
    read_regular,
)
from openbook.server.identity import load_secret


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o704, 0o777])
def test_a_data_directory_open_to_others_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(DataDirectoryRefused, match="open to other users"):
        open_data_directory(tmp_path)


def test_a_file_is_no_data_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataDirectoryRefused, match="not a directory"):
            open_data_directory(path)


def test_two_servers_never_share_a_data_directory(data):
    with open_data_directory(data):
        with pytest.raises(DataDirectoryRefused, match="another server"):
            open_data_directory(data)
    open_data_directory(data).close()


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_what_is_no_folder_where_one_belongs_is_refused(data, name, kind):
    path = data / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if kind == "file":
        path.write_text("")
    elif kind == "link":
        (data.parent / "elsewhere").mkdir()
        path.symlink_to(data.parent / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(DataDirectoryRefused, match=f"{name} must be a directory"):
        open_data_directory(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_where_one_belongs_is_refused_and_not_waited_for(data, name, kind):
    if kind == "folder":
        (data / name).mkdir(mode=0o755)
    else:
        os.mkfifo(data / name)
    with pytest.raises(DataDirectoryRefused, match=f"{name} must be a regular file"):
        open_data_directory(data)


def test_a_folder_in_place_of_valkey_s_socket_is_refused_and_an_old_socket_is_not(data):
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(data / "valkey.sock"))
    open_data_directory(data).close()
    (data / "valkey.sock").unlink()
    (data / "valkey.sock").mkdir()
    with pytest.raises(DataDirectoryRefused, match="valkey.sock must not be a directory"):
        open_data_directory(data)


def test_a_directory_of_other_things_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "README.md").write_text("a clone")
    tmp_path.chmod(0o755)
    with pytest.raises(DataDirectoryRefused, match="not empty and no openbook data directory"):
        open_data_directory(tmp_path)
    assert os.listdir(tmp_path) == ["README.md"]


def test_a_directory_is_ours_before_its_first_start_has_ended_and_ever_after(data):
    (data / "lost+found").mkdir()
    open_data_directory(data).close()  # and is killed before there is a secret
    with open_data_directory(data):
        load_secret(data)
    (data / "notes.txt").write_text("put there by a person")
    open_data_directory(data).close()


def test_the_store_s_own_folders_are_among_those_that_are_checked():
    assert {f"contexts/{TMP_NAME}", f"contexts/{TRASH_NAME}"} < set(FOLDERS)


def test_only_regular_files_of_bounded_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"four")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    assert read_regular(tmp_path / "file", bytes_max=4) == b"four"
    assert read_regular(tmp_path / "file", bytes_max=3) is None
    for name in ("link", "folder", "pipe", "socket", "missing"):
        assert read_regular(tmp_path / name, bytes_max=4) is None
