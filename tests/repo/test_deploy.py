"""The files of deploy/ say what the repository and the server have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from midstream.config.config import Config
from midstream.server.metrics import COUNTERS, GAUGES, HISTOGRAMS
from midstream.server.routes.status import router

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER",
    "WORKDIR",
}  # fmt: skip


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, lines that go on joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.partition(" ")
        found.append((name, rest.strip()))
    return found


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def exported() -> set[str]:
    """Names of the series that the server exports."""
    suffixes = ("_bucket", "_sum", "_count")
    return {
        *(f"midstream:{name}_total" for name, *_ in COUNTERS),
        *(f"midstream:{name}" for name, *_ in GAUGES),
        *(f"midstream:{name}{suffix}" for name, *_ in HISTOGRAMS for suffix in suffixes),
    }


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_well_formed_and_copies_what_there_is(path):
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    names = [name for name, _ in found if name != "ARG"]
    assert names[0] == "FROM"
    for name, rest in found:
        if name == "FROM":
            assert re.fullmatch(r"[a-z0-9./-]+:[A-Za-z0-9.${}_-]+", rest)
            assert not rest.endswith(":latest")
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
def test_the_health_of_an_image_is_the_servers_readiness(path):
    [check] = [rest for name, rest in instructions(path) if name == "HEALTHCHECK"]
    [url] = re.findall(r"http://127\.0\.0\.1:8000(/[a-z/]+)", check)
    assert url in {route.path for route in router.routes}


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


def test_every_metric_of_the_dashboard_is_exported():
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"midstream:[a-z_]+", query)}
    assert len(named) > 20
    assert named <= exported()
    labels = {label for query in queries for label in re.findall(r"by \(([a-z_, ]+)\)", query)}
    assert labels <= {"status", "le"}


def test_the_dashboard_asks_the_data_source_that_is_provisioned():
    file = DEPLOY / "grafana/provisioning/datasources/prometheus.yaml"
    [source] = yaml.safe_load(file.read_text())["datasources"]
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def has_docker() -> bool:
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
