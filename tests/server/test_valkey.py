"""The embedded Valkey lives on a private socket and never outlives us."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from openbook.server.valkey import (
    SOCKET_PATH_BYTES,
    EmbeddedValkey,
    ValkeyFailed,
    socket_path_for,
)


def _ask(path: Path) -> int:
    with redis.Redis(unix_socket_path=str(path), protocol=2) as client:
        return int(client.info("server")["process_id"])


def _wait_until_gone(pid: int) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_valkey_answers_on_a_private_socket_and_nowhere_else(valkey):
    with redis.Redis(unix_socket_path=str(valkey.socket_path), protocol=2) as client:
        assert client.config_get("port")["port"] == "0"
        assert client.config_get("save")["save"] == ""
    assert stat.S_IMODE(valkey.socket_path.stat().st_mode) == 0o700


def test_stop_ends_the_process_and_removes_the_socket(data):
    server = EmbeddedValkey(data)
    server.start()
    pid = _ask(server.socket_path)
    server.stop()
    assert _wait_until_gone(pid)
    assert not server.socket_path.exists()


def test_stop_ends_a_frozen_process(data):
    server = EmbeddedValkey(data)
    server.start()
    pid = _ask(server.socket_path)
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert _wait_until_gone(pid)


def test_is_running_notices_a_killed_process(valkey):
    pid = _ask(valkey.socket_path)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 5
    while valkey.is_running() and time.monotonic() < end:
        time.sleep(0.02)
    assert not valkey.is_running()
    valkey.start()
    assert _ask(valkey.socket_path) != pid


def test_valkey_dies_with_us_even_by_kill_9_and_the_next_start_works(data):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from openbook.server.valkey import EmbeddedValkey\n"
        "server = EmbeddedValkey(Path(sys.argv[1])); server.start()\n"
        "print('up', flush=True); time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(data)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    pid = _ask(data / "valkey.sock")
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert _wait_until_gone(pid)
    assert (data / "valkey.sock").exists()  # left over, as after any kill
    again = EmbeddedValkey(data)
    again.start()
    assert _ask(again.socket_path) != pid
    again.stop()


def test_a_long_data_directory_gets_a_short_private_socket_directory(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    path = socket_path_for(deep)
    assert len(os.fsencode(path)) <= SOCKET_PATH_BYTES
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server = EmbeddedValkey(deep)
    server.start()
    assert _ask(path) > 0
    server.stop()
    path.parent.rmdir()


def test_what_the_disk_refuses_is_a_failure_to_start(data, tmp_path, monkeypatch):
    (data / "valkey.log").mkdir()
    with pytest.raises(ValkeyFailed, match="cannot start"):
        EmbeddedValkey(data).start()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(ValkeyFailed, match="cannot be made"):
        socket_path_for(tmp_path / ("d" * 100))
