"""The Helm chart is valid, restricted, and says no more than the server does.

Reads the templates as YAML with their template lines taken out; where helm is installed, the
rendered chart is checked as well.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from openbook.server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "openbook"
HELM = shutil.which("helm")
KINDS = {"NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount", "StatefulSet"}


def unrendered(name: str) -> Any:
    """Parse a template: lines that only direct the template go, values become `x`."""
    lines = (CHART / "templates" / name).read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not re.fullmatch(r"\s*\{\{-? .*\}\}", line)]
    return yaml.safe_load("\n".join(re.sub(r"\{\{.*?\}\}", "x", line) for line in kept))


def helm_template(*arguments: str) -> dict[str, Any]:
    """Render the chart; return the manifests by kind."""
    assert HELM, "helm is on the path"
    command = [HELM, "template", "release", str(CHART), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}


def values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def pod() -> dict[str, Any]:
    return unrendered("statefulset.yaml")["spec"]["template"]["spec"]


def test_chart_is_described_and_versioned_like_the_distribution() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert (chart["apiVersion"], chart["name"], chart["type"]) == ("v2", "openbook", "application")
    assert f'version = "{chart["appVersion"]}"' in pyproject
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart["version"])


def test_default_values_satisfy_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values(), schema(), jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"modle": "typo"},
        {"gpu": {"enabled": "yes"}},
        {"terminationGracePeriodSeconds": 60},
        {"settings": {"OPENBOOK_LISTEN": "0.0.0.0:50051"}},
        {"settings": {"PATH": "/bin"}},
        {"extraEnv": [{"value": "nameless"}]},
        {"extraEnv": [{"name": "OPENBOOK_LISTEN", "value": "0.0.0.0:50051"}]},
        {"extraEnv": [{"name": "HF_HOME", "value": "/tmp"}]},
        {"extraVolumes": [{"name": "data", "emptyDir": {}}]},
        {"extraVolumeMounts": [{"name": "models"}]},
        {"extraVolumeMounts": [{"name": "models", "mountPath": "/data"}]},
        {"persistence": {"size": "plenty"}},
        {"resources": {"requests": {"cpu": "2"}}},
    ],
    ids=str,
)
def test_schema_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values() | wrong, schema(), jsonschema.Draft7Validator)


EXTRAS = {
    "extraEnv": [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "https_proxy", "value": "http://proxy:3128"},
    ],
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
}


def test_schema_takes_a_model_volume_a_token_and_a_proxy() -> None:
    jsonschema.validate(values() | EXTRAS, schema(), jsonschema.Draft7Validator)


def test_every_value_is_in_the_schema_and_used_by_a_template() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(values()) == set(schema()["properties"]) - {"global"}
    for name in values():
        assert f".Values.{name}" in templates, name


def test_templates_are_the_expected_kinds() -> None:
    names = [path.name for path in (CHART / "templates").glob("*.yaml")]
    documents = [unrendered(name) for name in names]
    assert {document["kind"] for document in documents} == KINDS
    assert all(document["apiVersion"] and document["metadata"]["name"] for document in documents)


def test_pod_meets_the_restricted_security_standard() -> None:
    context = pod()["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod()["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_pod_holds_no_service_account_token() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert unrendered("serviceaccount.yaml")["automountServiceAccountToken"] is False


def test_kubernetes_adds_no_variables_that_look_like_settings() -> None:
    assert pod()["enableServiceLinks"] is False


def test_probes_run_inside_the_pod_where_loopback_answers() -> None:
    (container,) = pod()["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = container[probe]["exec"]["command"]
        assert command[:2] == ["python", "/opt/openbook/healthcheck.py"], probe


def test_pod_sets_only_settings_that_the_server_has() -> None:
    (container,) = pod()["containers"]
    names = {entry["name"] for entry in container["env"]} - {"HF_HOME", "XDG_CACHE_HOME", "x"}
    assert names <= {f"OPENBOOK_{field.upper()}" for field in Settings.model_fields}
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    settings = Settings(
        role=given["OPENBOOK_ROLE"],
        listen=given["OPENBOOK_LISTEN"],
        data=given["OPENBOOK_DATA"],
        model=values()["model"],
        dtype=values()["dtype"],
    )
    assert settings.drain_s < values()["terminationGracePeriodSeconds"]


def test_threads_follow_the_cpu_limit() -> None:
    (container,) = pod()["containers"]
    given = {entry["name"]: entry.get("valueFrom") for entry in container["env"]}
    assert given["OPENBOOK_THREADS"] == {
        "resourceFieldRef": {"resource": "limits.cpu", "divisor": "1"}
    }
    assert "cpu" in values()["resources"]["limits"]


def test_caches_of_models_are_on_the_volume() -> None:
    (container,) = pod()["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert given["XDG_CACHE_HOME"].startswith("/data/")
    assert given["HF_HOME"].startswith(given["XDG_CACHE_HOME"] + "/")


def test_data_and_temporary_files_are_the_only_writable_places() -> None:
    (container,) = pod()["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = unrendered("statefulset.yaml")["spec"]["volumeClaimTemplates"]
    assert mounts == {"/data": "data", "/tmp": "tmp"}
    assert [claim["metadata"]["name"] for claim in claims] == ["data"]


def test_service_is_headless() -> None:
    assert unrendered("service.yaml")["spec"]["clusterIP"] == "None"


def test_network_policy_lets_nothing_in() -> None:
    spec = unrendered("networkpolicy.yaml")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == []


def test_disruption_budget_never_blocks_a_drain() -> None:
    assert unrendered("poddisruptionbudget.yaml")["spec"]["maxUnavailable"] == 1


def test_notes_say_how_a_client_reaches_loopback() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    assert "port-forward" in notes and "loopback" in notes
    assert "make build" in notes and "pip install" not in notes, "nothing is published"
    snippet = notes[notes.index("  from openbook") :]
    compile("\n".join(line[2:] for line in snippet.splitlines()), "NOTES.txt", "exec")


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_chart_renders_every_kind() -> None:
    assert set(helm_template()) == KINDS


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_extras_are_rendered_beside_the_charts_own(tmp_path: Path) -> None:
    file = tmp_path / "extras.yaml"
    file.write_text(yaml.safe_dump(EXTRAS | {"settings": {"OPENBOOK_THREADS": "3"}}))
    spec = helm_template("--values", str(file))["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert [e["name"] for e in container["env"][-2:]] == ["HF_TOKEN", "https_proxy"]
    assert [e["value"] for e in container["env"] if e["name"] == "OPENBOOK_THREADS"] == ["3"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [
        "/data", "/tmp", "/models",
    ]  # fmt: skip
    assert [volume["name"] for volume in spec["volumes"]] == ["tmp", "models"]


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_gpu_is_asked_for_only_when_enabled() -> None:
    for arguments, expected in ((), None), (("--set", "gpu.enabled=true"), 1):
        spec = helm_template(*arguments)["StatefulSet"]["spec"]["template"]["spec"]
        limits = spec["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == expected
        assert ("tolerations" in spec) == bool(expected)


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_chart_passes_strict_lint() -> None:
    assert HELM, "helm is on the path"
    command = [HELM, "lint", "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
