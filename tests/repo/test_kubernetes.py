"""The files of deploy/kubernetes: by the schemas of Kubernetes, and what they say of the server."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from midstream.config.config import Config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"
KUSTOMIZATIONS = sorted(FOLDER.rglob("kustomization.yaml"))
BUILT = [BASE, FOLDER / "overlays" / "gpu-monitored"]
VERSIONS = ("1.28.0", "1.37.0")  # of Kubernetes: an old one, and the latest of the schemas
# What an operator makes beside these files.
MADE_BY_OPERATORS = {"Secret": {"midstream-keys"}, "PersistentVolumeClaim": {"midstream-models"}}
KUSTOMIZE_FIELDS = {
    "apiVersion", "kind", "labels", "resources", "configMapGenerator", "images", "patches",
    "namespace", "components",
}  # fmt: skip


def loaded(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kustomize():
    """The command that builds a folder; None: there is none. Debian's kubectl has kustomize 2."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if not shutil.which("kubectl"):
        return None
    words = ["kubectl", "version", "--client", "--output=json"]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    is_new = re.search(r'"kustomizeVersion": "v([5-9]|\d\d)', said)
    return ["kubectl", "kustomize"] if is_new else None


@functools.cache
def built(folder):
    """The objects that kustomize makes of a folder."""
    command = kustomize()
    if command is None:
        pytest.skip("neither kustomize nor a kubectl with kustomize 5 is installed")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def object_files():
    names = {"kustomization.yaml", "gpu.yaml"}  # a patch is no whole object
    return [path for path in sorted(FOLDER.rglob("*.yaml")) if path.name not in names]


def check_object(document):
    """Check an object by the schemas, or one of the Prometheus operator by what it may have."""
    if document["apiVersion"] == "monitoring.coreos.com/v1":
        check_monitoring(document)
        return
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def check_monitoring(document):
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    spec = document["spec"]
    if document["kind"] == "PodMonitor":
        assert set(spec) == {"selector", "podMetricsEndpoints"}
        [endpoint] = spec["podMetricsEndpoints"]
        assert set(endpoint) <= {"port", "path", "interval"}
        assert re.fullmatch(r"\d+s", endpoint["interval"])
        return
    assert document["kind"] == "PrometheusRule"
    assert set(spec) == {"groups"}
    for group in spec["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert {"alert", "expr", "labels", "annotations"} <= set(rule)
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


@pytest.mark.parametrize("path", object_files(), ids=lambda path: path.name)
def test_every_object_is_valid_by_the_schemas(path):
    documents = loaded(path)
    assert documents
    for document in documents:
        check_object(document)


def test_the_check_finds_a_misspelt_field_and_a_wrong_type():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    [deployment] = loaded(BASE / "deployment.yaml")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    for name, value in (("livenesProbe", {}), ("ports", "8000")):
        before = dict(container)
        container[name] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            check_object(deployment)
        container.clear()
        container.update(before)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_has_known_fields_and_names_files_that_there_are(path):
    [made] = loaded(path)
    assert set(made) <= KUSTOMIZE_FIELDS
    assert made["kind"] in ("Kustomization", "Component")
    named = [*made.get("resources", ()), *made.get("components", ())]
    named += [patch["path"] for patch in made.get("patches", ())]
    for generator in made.get("configMapGenerator", ()):
        assert set(generator) <= {"name", "behavior", "literals", "files"}
        named += generator.get("files", ())
    for name in named:
        assert (path.parent / name).exists(), name
    others = {other.name for other in path.parent.iterdir()} - {"kustomization.yaml"}
    assert others == {name for name in named if "/" not in name}


@pytest.mark.parametrize("folder", BUILT, ids=lambda folder: folder.name)
def test_what_kustomize_builds_is_valid_and_refers_to_what_there_is(folder):
    objects = built(folder)
    names = {(made["kind"], made["metadata"]["name"]) for made in objects}
    names |= {(kind, name) for kind, made in MADE_BY_OPERATORS.items() for name in made}
    for made in objects:
        check_object(made)
    [deployment] = [made for made in objects if made["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [settings] = [made for made in objects if made["kind"] == "ConfigMap"]
    for variable in container["env"]:
        [(source, reference)] = variable["valueFrom"].items()
        kind = {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}[source]
        assert (kind, reference["name"]) in names, variable
        if kind == "ConfigMap":
            assert reference["key"] in settings["data"]
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert ("PersistentVolumeClaim", claim) in names
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    # All that select pods select these.
    pod_labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod_labels
    for made in objects:
        selector = made.get("spec", {}).get("selector", {})
        assert selector.get("matchLabels", selector).items() <= pod_labels.items()
    parsed = Config.parse(json.loads(settings["data"]["settings.json"]))
    for sink in parsed.events.values():
        if sink.get("path"):
            assert sink["path"].startswith("/srv/midstream/.cache/"), "the root is read-only"


def test_a_pod_has_no_privilege_and_the_probes_and_times_of_the_page():
    [deployment] = loaded(BASE / "deployment.yaml")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "MIDSTREAM_PORT would be a variable"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for dockerfile in (ROOT / "deploy").glob("Dockerfile.*"):
        assert f"--uid {pod['securityContext']['runAsUser']} " in dockerfile.read_text()
    page = (ROOT / "docs" / "deploy.md").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        [shown] = re.findall(rf"^{probe}: (.*)$", page, re.MULTILINE)
        told = yaml.safe_load(shown)
        told["httpGet"]["port"] = "http"  # 8000, by its name
        assert container[probe] == told
    [port] = container["ports"]
    assert port == {"name": "http", "containerPort": 8000}
    words = container["args"]
    timeout = int(words[words.index("--shutdown-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] > timeout
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]
    }
    assert mounts == {
        "/models": True, "/srv/midstream/.cache": False, "/tmp": False, "/dev/shm": False,
    }  # fmt: skip


def test_the_rule_of_the_operator_is_written_of_the_alerts():
    script = [sys.executable, "scripts/prometheus_rule.py", "--check"]
    assert subprocess.run(script, cwd=ROOT, check=False).returncode == 0, "run it without --check"
    [rule] = loaded(FOLDER / "components" / "monitoring" / "prometheus-rule.yaml")
    alerts = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    assert rule["spec"] == alerts
