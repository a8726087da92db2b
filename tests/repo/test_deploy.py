"""The files of deploy/ say what the repository and the server have."""

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from midstream.config.config import Config
from midstream.server.metrics import COUNTERS, GAUGES, HISTOGRAMS
from midstream.server.routes.status import router

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER",
    "WORKDIR",
}  # fmt: skip


def instructions(path):
    """(instruction, arguments) of a Dockerfile, lines that go on joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.partition(" ")
        found.append((name, rest.strip()))
    return found


def base_of(found):
    """The image that a Dockerfile builds upon, unless the argument BASE says otherwise."""
    [base] = [rest for name, rest in found if name == "ARG" and rest.startswith("BASE=")]
    return base.removeprefix("BASE=")


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def exported():
    """Names of the series that the server exports."""
    suffixes = ("_bucket", "_sum", "_count")
    return {
        *(f"midstream:{name}_total" for name, *_ in COUNTERS),
        *(f"midstream:{name}" for name, *_ in GAUGES),
        *(f"midstream:{name}{suffix}" for name, *_ in HISTOGRAMS for suffix in suffixes),
    }


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_well_formed_copies_what_there_is_and_gives_the_server_its_folder(path):
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    names = [name for name, _ in found if name != "ARG"]
    assert names[0] == "FROM"
    for name, rest in found:
        if name == "FROM":
            image = base_of(found)
            assert rest == "${BASE}", "the base image cannot be given by its digest"
            assert re.fullmatch(r"[a-z0-9./-]+:[A-Za-z0-9.${}_-]+", image)
            assert not image.endswith(":latest")
        if name == "COPY":
            *sources, target = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            assert target.endswith("/") or len(sources) == 1
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if name == "ENTRYPOINT":
            words = json.loads(rest)
            assert words[:2] == ["midstream", "serve"]
    users = [rest for name, rest in found if name == "USER"]
    assert users, "a server that listens on all addresses runs as root"
    assert users[-1] not in ("root", "0")
    runs = " ".join(rest for name, rest in found if name == "RUN")
    assert "install --directory --owner=midstream --mode=700 /srv/midstream/.cache" in runs
    text = path.read_text()
    for option in ("--read-only", "--tmpfs /tmp:exec", "--cap-drop ALL",
                   "--security-opt no-new-privileges", ":/srv/midstream/.cache"):  # fmt: skip
        assert option in text


def test_the_image_for_the_cpu_is_set_up_by_the_script():
    runs = [rest for name, rest in instructions(DEPLOY / "Dockerfile.cpu") if name == "RUN"]
    assert "scripts/setup.sh" in runs
    copied = " ".join(
        rest for name, rest in instructions(DEPLOY / "Dockerfile.cpu") if name == "COPY"
    )
    project = (ROOT / "pyproject.toml").read_text()
    for needed in ("pyproject.toml", "README.md", "LICENSE", "scripts/setup.sh", "src"):
        assert needed in copied
    assert 'readme = "README.md"' in project
    assert 'license-files = ["LICENSE"]' in project


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_health_of_an_image_is_what_the_page_has_a_server_restarted_by(path):
    [check] = [rest for name, rest in instructions(path) if name == "HEALTHCHECK"]
    [url] = re.findall(r"http://127\.0\.0\.1:8000(/[a-z/]+)", check)
    page = (ROOT / "docs" / "deploy.md").read_text()
    [liveness] = re.findall(r"livenessProbe: \{httpGet: \{path: (\S+),", page)
    [readiness] = re.findall(r"readinessProbe: \{httpGet: \{path: (\S+),", page)
    # A server that drains is not ready, and must not be ended for it.
    assert url == liveness != readiness
    assert readiness in {route.path for route in router.routes}
    assert "`HEALTHCHECK` is the liveness" in page


def ignored(name):
    """Whether Docker leaves a file of the repository out of what an image is built of."""
    found = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        parts = name.split("/")
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts)
        else:
            matches = any(
                fnmatch.fnmatch(head, pattern) and head.count("/") == pattern.count("/")
                for head in heads
            )
        if matches:
            found = not line.startswith("!")
    return found


def test_the_images_are_built_of_what_they_copy_and_of_nothing_else():
    copied = set()
    for path in DOCKERFILES:
        for name, rest in instructions(path):
            if name == "COPY":
                copied |= set(rest.split()[:-1])
    files = ["src/midstream/version.py" if source == "src" else source for source in copied]
    assert [file for file in files if ignored(file)] == []
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sent = {file.split("/")[0] for file in listed.stdout.split() if not ignored(file)}
    assert sent == {source.split("/")[0] for source in copied}
    secrets = [".git/config", ".venv/bin/python", ".models/x/model.safetensors", ".env", "a.pem"]
    others = ["deploy/models/x", "scripts/other.sh", "src/midstream/__pycache__/x.pyc"]
    for secret in (*secrets, *others):
        assert ignored(secret), secret


def test_no_service_has_privileges_and_every_image_can_be_given_by_its_digest():
    found = compose()
    for name, service in found["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert "privileged" not in service, name
        assert "cap_add" not in service, name
        for volume in service["volumes"]:
            is_named = volume.split(":")[0] in found["volumes"]
            assert is_named or volume.endswith(":ro"), volume
    # What vLLM compiles is loaded from there.
    assert found["services"]["server"]["tmpfs"] == ["/tmp:exec,mode=1777"]
    assert "cache:/srv/midstream/.cache" in found["services"]["server"]["volumes"]
    services = compose()["services"]
    for name, service in services.items():
        image = service.get("image")
        if image is not None:
            default = re.fullmatch(r"\$\{[A-Z]+:-([a-z/]+:[a-z0-9.]+)\}", image)
            assert default, name
            assert not default[1].endswith(":latest")
    assert services["server"]["build"]["args"] == ["BASE"]


def test_the_compose_file_names_files_that_there_are_and_settings_that_are_known():
    services = compose()["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), volume
    server = services["server"]
    for build in ("cpu", "gpu"):
        file = server["build"]["dockerfile"].replace("${BUILD:-cpu}", build)
        assert (ROOT / file).exists()
    words = server["command"]
    Config.parse(json.loads(words[words.index("--settings") + 1]))
    grace = int(server["stop_grace_period"].removesuffix("s"))
    assert grace > int(words[words.index("--shutdown-timeout") + 1])
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    [job] = scraped["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target == "server:8000"


def labels_of():
    """The labels of each metric, by the name under which it is registered."""
    metrics = (*COUNTERS, *GAUGES, *HISTOGRAMS)
    return {f"midstream:{name}": set(labels) for name, _, labels in metrics}


def series_of(expression):
    """The series of midstream's in an expression, with the labels that its selectors name."""
    found = re.findall(r"(midstream:[a-z_]+)(?:\{([^}]*)\})?", expression)
    return [(name, set(re.findall(r"(\w+)\s*[=!]", selector))) for name, selector in found]


def check_expression(expression):
    """Check that the server exports what an expression reads, with its labels."""
    grouped = {
        label
        for labels in re.findall(r"by \(([a-z_, ]+)\)", expression)
        for label in labels.split(", ")
    }
    known = {"le", "instance"}
    for name, selected in series_of(expression):
        assert name in exported(), name
        metric = re.sub(r"_(total|bucket|sum|count)$", "", name)
        # Prometheus adds the server's address.
        assert selected <= labels_of()[metric] | {"instance"}, expression
        known |= labels_of()[metric]
    assert grouped <= known, expression


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_metric_of_a_dashboard_is_exported_to_the_data_source_that_is_provisioned(file):
    dashboard = json.loads(file.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for query in queries:
        check_expression(query)
    variables = dashboard.get("templating", {}).get("list", [])
    for variable in variables:
        metric, label = re.findall(r"label_values\((\S+), (\w+)\)", variable["query"]["query"])[0]
        assert label in labels_of()[metric.removesuffix("_total")]
    used = {name for query in queries for name in re.findall(r"\$(\w+)", query)}
    assert used == {"__rate_interval", *(variable["name"] for variable in variables)}
    provisioned = DEPLOY / "grafana/provisioning/datasources/prometheus.yaml"
    [source] = yaml.safe_load(provisioned.read_text())["datasources"]
    shown = (*dashboard["panels"], *variables)
    assert {panel["datasource"]["uid"] for panel in shown} == {source["uid"]}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    mounts = compose()["services"]["grafana"]["volumes"]
    assert any(mount.startswith(f"./grafana/{file.name}:") for mount in mounts)


def test_the_dashboards_have_names_of_their_own_and_show_the_server_and_its_guards():
    shown = [json.loads(file.read_text()) for file in DASHBOARDS]
    assert len({dashboard["uid"] for dashboard in shown}) == len(shown) == 2
    text = "".join(file.read_text() for file in DASHBOARDS)
    assert len(set(re.findall(r"midstream:[a-z_]+", text))) > 25
    guards = {name for name in labels_of() if name.startswith("midstream:guard_")}
    assert {name for name in guards if name not in text} == set()


def alerts():
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_an_alert_reads_what_there_is_and_says_how_bad_it_is_and_where_to_look():
    page = (ROOT / "docs" / "runbook.md").read_text()
    sections = [
        heading.lower() for heading in re.findall(r"^### (Midstream\w+)$", page, re.MULTILINE)
    ]
    names = [rule["alert"] for rule in alerts()]
    assert sections == [name.lower() for name in names], "sections are in the order of the alerts"
    others = set()
    for rule in alerts():
        check_expression(rule["expr"])
        others |= set(re.findall(r"\b(?:up|http_\w+|vllm:\w+)\b", rule["expr"]))
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert others == {"up", "http_requests_total", "vllm:request_success_total"}
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert scraped["rule_files"] == ["alerts.yaml"]
    assert "midstream" in scraped["scrape_configs"][0]["job_name"]


def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not():
    tests = yaml.safe_load((DEPLOY / "alerts_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for fires in (True, False):
        tried = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires}
        assert tried == {rule["alert"] for rule in alerts()}, fires
    for test in tests:
        for series in test["input_series"]:
            check_expression(series["series"])


def promtool(*words):
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool: apt-get install prometheus")
    done = subprocess.run(
        ["promtool", *words], cwd=DEPLOY, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.engine  # starts processes
def test_the_alerts_fire_as_their_tests_say():
    promtool("test", "rules", "alerts_test.yaml")


def test_prometheus_accepts_its_configuration_and_every_query_of_the_dashboards(tmp_path):
    promtool("check", "config", "prometheus.yaml")
    rules = [
        {"record": f"{file.stem}:{panel['id']}:{target['refId']}",
         "expr": target["expr"].replace("$__rate_interval", "5m").replace("$guard", ".*")}
        for file in DASHBOARDS
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    ]  # fmt: skip
    queries = tmp_path / "queries.yaml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    promtool("check", "rules", str(queries))


def has_docker():
    """Whether there is a daemon that builds images."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(not has_docker(), reason="there is no Docker daemon")
def test_the_image_for_the_cpu_is_built_and_its_command_answers():
    build = ["docker", "build", "-f", "deploy/Dockerfile.cpu", "-t", "midstream:test", "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=3000)
    run = ["docker", "run", "--rm", "midstream:test", "--help"]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600)
    assert "Serve a model" in done.stdout
