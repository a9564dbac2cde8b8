"""The compose file and the Dockerfile are valid, restricted, and agree with chart and server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from openbook.server.settings import Settings, address_of

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SERVICE_KEYS = {
    "build", "cap_drop", "command", "cpus", "environment", "healthcheck", "image", "init",
    "mem_limit", "network_mode", "profiles", "read_only", "restart", "security_opt",
    "stop_grace_period", "tmpfs", "user", "volumes",
}  # fmt: skip
PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
PASSED_ON = {"HF_TOKEN", *PROXIES, *map(str.lower, PROXIES)}


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


def instructions(stage: int = -1) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of one build stage, continuation lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    stages = re.split(r"^(?=FROM )", text, flags=re.M)[1:]
    lines = [line for line in stages[stage].splitlines() if line.strip()]
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines]


def test_services_use_only_keys_of_the_compose_specification() -> None:
    assert set(compose()) == {"name", "services", "volumes"}
    for name, service in compose()["services"].items():
        assert set(service) <= SERVICE_KEYS, name
        assert service["image"], name


def test_the_one_service_runs_every_role_and_valkey_is_optional() -> None:
    services = compose()["services"]
    assert set(services) == {"openbook", "valkey"}
    assert services["valkey"]["profiles"] == ["valkey"]
    assert "profiles" not in services["openbook"]


def test_services_are_restricted_and_checked_for_health() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["healthcheck"]["test"][0] == "CMD", name


def test_service_is_reached_over_the_hosts_loopback_only() -> None:
    for name, service in compose()["services"].items():
        assert service["network_mode"] == "host", name
    listen = compose()["services"]["openbook"]["environment"]["OPENBOOK_LISTEN"]
    assert address_of(re.sub(r"\$\{\w+:-(.*)\}", r"\1", listen)) == "127.0.0.1:50051"
    assert "127.0.0.1" in compose()["services"]["valkey"]["command"]


def test_service_sets_only_settings_that_the_server_has() -> None:
    known = {f"OPENBOOK_{field.upper()}" for field in Settings.model_fields}
    assert set(compose()["services"]["openbook"]["environment"]) <= known | PASSED_ON


def test_what_a_download_needs_is_passed_on_where_it_is_set() -> None:
    environment = compose()["services"]["openbook"]["environment"]
    assert {name for name in PASSED_ON if environment.get(name, "") is None} == PASSED_ON


def test_services_are_limited_and_the_server_has_a_thread_a_core() -> None:
    for name, service in compose()["services"].items():
        assert service["cpus"] and service["mem_limit"], name
    service = compose()["services"]["openbook"]
    assert service["cpus"] == service["environment"]["OPENBOOK_THREADS"]
    assert re.fullmatch(r"\$\{OPENBOOK_THREADS:-\d+\}", service["cpus"])
    assert re.fullmatch(r"\$\{OPENBOOK_MEMORY:-\d+g\}", service["mem_limit"])


def test_service_is_given_longer_to_stop_than_the_server_drains() -> None:
    grace = compose()["services"]["openbook"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > Settings.model_fields["drain_s"].default


def test_data_is_a_volume_and_models_of_ones_own_are_mounted_read_only() -> None:
    data, models = compose()["services"]["openbook"]["volumes"]
    assert data == "data:/data" and set(compose()["volumes"]) == {"data"}
    assert models == "${OPENBOOK_MODELS:-./.models}:/models:ro"


def test_caches_of_models_are_on_the_volume_and_not_in_memory() -> None:
    (settings,) = (arguments for name, arguments in instructions() if name == "ENV")
    given = dict(pair.split("=", 1) for pair in settings.split())
    chart = (ROOT / "charts/openbook/templates/statefulset.yaml").read_text(encoding="utf-8")
    assert given["XDG_CACHE_HOME"].startswith("/data/")
    assert given["HF_HOME"].startswith(given["XDG_CACHE_HOME"] + "/")
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        assert f"- name: {name}\n              value: {given[name]}\n" in chart


def test_image_runs_as_a_user_that_is_not_root_and_is_the_charts() -> None:
    users = [arguments for name, arguments in instructions() if name == "USER"]
    chart = (ROOT / "charts/openbook/templates/statefulset.yaml").read_text(encoding="utf-8")
    assert users == ["10001:10001"]
    assert "runAsUser: 10001\n" in chart and "runAsGroup: 10001\n" in chart


def test_image_checks_its_own_health() -> None:
    checks = [arguments for name, arguments in instructions() if name == "HEALTHCHECK"]
    copied = [arguments for name, arguments in instructions() if name == "COPY"]
    assert len(checks) == 1 and "/opt/openbook/healthcheck.py" in checks[0]
    assert "scripts/healthcheck.py /opt/openbook/healthcheck.py" in copied
    assert (ROOT / "scripts/healthcheck.py").is_file()


def test_compiler_stays_out_of_the_image_that_runs() -> None:
    assert any("gcc" in arguments for _, arguments in instructions(0))
    assert not any("gcc" in arguments for _, arguments in instructions())


def test_every_file_that_the_image_copies_exists_and_reaches_the_builder() -> None:
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for stage in (0, 1):
        for name, arguments in instructions(stage):
            if name == "COPY" and "--from" not in arguments:
                for source in arguments.split()[:-1]:
                    assert (ROOT / source).exists(), source
                    assert f"!{source.split('/')[0]}" in sent, source


def health_check(port: int, *arguments: str) -> int:
    """Run the check with a proxy in its environment that nobody answers for."""
    command = [sys.executable, str(ROOT / "scripts" / "healthcheck.py"), *arguments]
    proxies = dict.fromkeys(["http_proxy", "https_proxy", "grpc_proxy"], "http://127.0.0.1:9")
    environ = {k: v for k, v in os.environ.items() if k.lower() != "no_proxy"} | proxies
    environ["OPENBOOK_LISTEN"] = f"127.0.0.1:{port}"
    return subprocess.run(command, env=environ, capture_output=True, timeout=60).returncode


def test_health_check_follows_the_server_and_tells_draining_from_dead() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert health_check(port) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert (health_check(port), health_check(port, "--alive")) == (1, 0)
    server.stop(None).wait()
    assert health_check(port, "--alive") == 1
