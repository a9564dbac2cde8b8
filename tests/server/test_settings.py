"""Settings come from options, then the environment; a wrong one is one line without its value."""

import pytest

from openbook.server.cores import usable_cores
from openbook.server.settings import (
    SettingsInvalid,
    address_of,
    is_loopback,
    load_settings,
    unknown_variables,
)

NEEDED = {"data": "/tmp/x", "model": "m"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("OPENBOOK_DATA", "OPENBOOK_MODEL", "OPENBOOK_LISTEN", "OPENBOOK_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_the_environment_is_read_and_an_option_wins(monkeypatch):
    monkeypatch.setenv("OPENBOOK_DATA", "/tmp/env")
    monkeypatch.setenv("OPENBOOK_MODEL", "env/model")
    monkeypatch.setenv("OPENBOOK_THREADS", "3")
    settings = load_settings({"model": "option/model", "listen": None})
    assert str(settings.data) == "/tmp/env" and settings.model == "option/model"
    assert settings.threads == 3 and settings.listen == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": None}, "--data (or OPENBOOK_DATA)"),
        ({**NEEDED, "answer_tokens_max": 32_769}, "OPENBOOK_ANSWER_TOKENS_MAX"),
        ({**NEEDED, "threads": "many"}, "--threads"),
        ({**NEEDED, "threads": 0}, "--threads"),
        ({**NEEDED, "dtype": "int4"}, "--dtype"),
        ({**NEEDED, "kv_dtype": "int8"}, "--kv-dtype"),
        ({**NEEDED, "plan": "guess"}, "--plan"),
        ({**NEEDED, "rope_scale": float("nan")}, "--rope-scale"),
        ({**NEEDED, "rope_scale": 0.5}, "--rope-scale"),
        ({**NEEDED, "model": ""}, "--model"),
        ({**NEEDED, "role": "gateway"}, "'gateway' is not served yet"),
        ({**NEEDED, "role": "ingest"}, "'ingest' is not served yet"),
        ({**NEEDED, "role": "decode"}, "'decode' is not served yet"),
        ({**NEEDED, "role": "boss"}, "--role"),
        ({**NEEDED, "unknown": 1}, "--unknown"),
        ({**NEEDED, "data": ""}, "--data"),
        ({**NEEDED, "redis_url": "http://:hunter2@host"}, "--redis-url"),
        ({**NEEDED, "redis_url": "redis://:hunter2@host:notaport"}, "--redis-url"),
        ({**NEEDED, "redis_url": "redis://:hunter2@[::1"}, "--redis-url"),
        ({**NEEDED, "redis_url": "redis://:hunter2@host?hunter2=x"}, "--redis-url"),
        ({**NEEDED, "redis_url": "redis://:hunter2@host?socket_timeout=x"}, "--redis-url"),
        ({**NEEDED, "lease_ttl_s": 1e308}, "OPENBOOK_LEASE_TTL_S"),
        ({**NEEDED, "lease_ttl_s": 1e-9}, "OPENBOOK_LEASE_TTL_S"),
        ({**NEEDED, "drain_s": 1e308}, "OPENBOOK_DRAIN_S"),
        ({**NEEDED, "ask_deadline_s": 1e308}, "OPENBOOK_ASK_DEADLINE_S"),
        ({**NEEDED, "call_deadline_s": 1e308}, "OPENBOOK_CALL_DEADLINE_S"),
        ({**NEEDED, "ingest_deadline_s": 1e308}, "OPENBOOK_INGEST_DEADLINE_S"),
        ({**NEEDED, "listen": "0.0.0.0:1"}, "only loopback"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(given, words):
    with pytest.raises(SettingsInvalid) as refused:
        load_settings(given)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_setting_that_is_no_option_is_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("OPENBOOK_DRAIN_S", "soon")
    with pytest.raises(SettingsInvalid) as refused:
        load_settings(NEEDED)
    assert "OPENBOOK_DRAIN_S" in str(refused.value) and "--" not in str(refused.value)


def test_as_many_threads_run_as_the_process_may_have_cores():
    assert load_settings(NEEDED).threads == usable_cores()


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://:p@h:6380/2", "unix:///run/redis.sock?db=1", "redis://[::1]:7"]
)
def test_a_url_of_a_redis_is_taken_unread(url):
    assert load_settings({**NEEDED, "redis_url": url}).redis_url.get_secret_value() == url


def test_a_password_is_not_shown():
    settings = load_settings({**NEEDED, "redis_url": "redis://:hunter2@127.0.0.1"})
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("listen", "bound"),
    [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("localhost:50051", "127.0.0.1:50051"),
        ("[::1]:7", "[::1]:7"),
        ("127.8.8.8:65535", "127.8.8.8:65535"),
    ],
)
def test_loopback_addresses_are_served(listen, bound):
    assert address_of(listen) == bound and is_loopback(bound)


@pytest.mark.parametrize(
    "listen",
    ["example.org:1", "127.0.0.1", "127.0.0.1:", ":50051",
     "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:x", "unix:/tmp/s", "", "127.0.0.1:\u0661"],
)  # fmt: skip
def test_what_is_no_numeric_address_is_refused(listen):
    with pytest.raises(ValueError):
        address_of(listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"])
def test_others_reach_a_server_only_with_a_token_and_over_tls(listen, tmp_path):
    given = {"data": tmp_path, "model": "m", "listen": listen}
    tls = {"tls_certificate": tmp_path / "c", "tls_key": tmp_path / "k"}
    token = {"token_file": tmp_path / "t"}
    for some in ({}, tls, token, token | {"tls_key": tmp_path / "k"}):
        with pytest.raises(SettingsInvalid) as refused:
            load_settings(given | some)
        assert "\n" not in str(refused.value)
    assert load_settings(given | tls | token).listen == listen


def test_a_variable_that_is_no_setting_is_found():
    assert unknown_variables({"OPENBOOK_TREADS": "3", "OPENBOOK_MODEL": "m", "HOME": "/"}) == [
        "OPENBOOK_TREADS"
    ]
