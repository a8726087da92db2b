"""The built wheel and sdist: what they contain, and an environment that has the wheel alone."""

import base64
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from midstream.results.activations import Activations
from midstream.results.receipt import Receipt
from midstream.results.serialization import pack
from midstream.version import __version__

# Starts processes of its own, which take long.
pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
TOP = {
    "src", "tests", "docs", "examples", "benchmarks", "scripts", "studio", "mkdocs.yml",
    "CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "README.md",
    "SECURITY.md", "pyproject.toml", "PKG-INFO", ".gitignore",
}  # fmt: skip

SCRIPT = """
import http.server, json, sys, threading
import midstream
from midstream import AsyncClient, Capture, Client, Probe, Steer, extra_body
from midstream.plan import Plan, Vector
from midstream.results.receipt import Receipt

body = open(sys.argv[1], "rb").read()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
with Client(f"http://127.0.0.1:{server.server_port}") as client:
    output = client.complete("a", model="m", capture=Capture(layers=[1]))
rows = output.activations["resid_post", 1]
print(json.dumps({
    "rows": rows.tolist(),
    "type": type(rows).__module__,
    "token_ids": output.activations.token_ids.tolist(),
    "scores": output.probes["p"].tolist(),
    "loaded": sorted({"torch", "vllm"} & set(sys.modules)),
}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this working tree, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # With the build tools of this environment: no download.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def requirements(built: tuple[Path, Path]) -> list[Requirement]:
    with zipfile.ZipFile(built[1]) as archive:
        text = archive.read(f"midstream-{__version__}.dist-info/METADATA")
    return [Requirement(line) for line in message_from_bytes(text).get_all("Requires-Dist", [])]


def is_plain(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def needed(requirements: list[Requirement]) -> set[str]:
    """Names of these requirements without extras, and of theirs."""
    found: set[str] = set()
    for one in filter(is_plain, requirements):
        if one.name not in found:
            found |= {one.name}
            found |= needed([Requirement(line) for line in metadata.requires(one.name) or ()])
    return found


def package_index(folder: Path, *distributions: Path) -> str:
    """Make a package index (PEP 503) of midstream in a folder. Return its URL."""
    page = folder / "simple" / "midstream"
    page.mkdir(parents=True, exist_ok=True)
    links = "".join(f'<a href="{path.as_uri()}">{path.name}</a>' for path in distributions)
    (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return page.parent.as_uri()


def install(python: Path, *arguments: str | Path) -> None:
    """Install a distribution without what it requires and without a network."""
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", *arguments], check=True)


@pytest.fixture(scope="module")
def python(
    built: tuple[Path, Path],
    requirements: list[Requirement],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A Python with the wheel installed, and links to what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("empty") / "env"
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    assert not {"torch", "vllm"} & needed(requirements)
    for name in needed(requirements):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in (".", "..") and not (site / top).exists():
                (site / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    # By name, as a user does.
    index = package_index(folder.parent, *built)
    install(folder / "bin" / "python", "--index-url", index, "midstream")
    return folder / "bin" / "python"


def run(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, "-I", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def answer(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    rows = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) / 8
    tap = ("resid_post", 1)
    captured = Activations({tap: rows}, {tap: torch.tensor([0, 2])}, [7, 8, 9])
    field = {
        "activations": {"base64": base64.b64encode(pack(captured, 3, rows.dtype)).decode()},
        "receipt": Receipt("x", 2, 1, (), None).to_dict(),
        "probes": {"p": {"scores": [0.5], "positions": [2], "token_ids": [9]}},
    }
    choice = {"index": 0, "text": "b", "finish_reason": "stop", "midstream": field}
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"id": "x", "choices": [choice]}))
    return file, rows


def test_rows_and_scores_are_arrays_of_numpy(python, tmp_path):
    file, rows = answer(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = json.loads(run(python, str(script), str(file)))
    assert found == {
        "rows": rows.float().tolist(),
        "type": "numpy",
        "token_ids": [7, 9],
        "scores": [0.5],
        "loaded": [],
    }


def command(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python.parent / "midstream", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_installed_command_shows_its_version_and_its_help(python):
    assert command(python, "--version").stdout == f"midstream {__version__}\n"
    shown = command(python, "--help")
    assert shown.returncode == 0
    assert "capture" in shown.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "some/model"),
        ("capture", "m", "--data", "DATA", "--out", "OUT"),
        pytest.param(("doctor", "some/model"), marks=pytest.mark.nightly),  # each is a process
        pytest.param(("verify", "OUT"), marks=pytest.mark.nightly),
    ],
)
def test_a_command_that_needs_an_extra_names_it(python, tmp_path, arguments):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n')
    places = {"DATA": str(data), "OUT": str(tmp_path / "out")}
    done = command(python, *(places.get(word, word) for word in arguments))
    assert done.returncode == 2, done.stderr
    assert 'pip install "midstream[vllm]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["LLM", "open_store"])
def test_a_name_that_needs_an_extra_raises_an_import_error_that_names_it(python, name):
    code = f"""
import midstream
try:
    midstream.{name}
except ImportError as error:
    print(isinstance(error, midstream.errors.MissingExtraError), error)
"""
    shown = run(python, "-c", code)
    assert shown.startswith(f"True midstream.{name} needs the package ")
    assert 'pip install "midstream[vllm]"' in shown


def test_the_distributions_pass_the_check_of_their_metadata(built):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *built],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_the_package_alone(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "midstream",
        f"midstream-{__version__}.dist-info",
    }
    assert "midstream/py.typed" in names
    files = (ROOT / "src/midstream").rglob("*")
    there = {
        f"midstream/{path.relative_to(ROOT / 'src/midstream').as_posix()}"
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert there <= set(names)


def test_the_sdist_has_files_that_git_tracks_and_no_others(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.partition("/")[0] for name in names} == TOP
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    built_site = {name for name in names if name.startswith("src/midstream/site/")}
    if listed.returncode == 0:  # an unpacked sdist is no repository
        assert names - built_site - {"PKG-INFO"} <= set(listed.stdout.splitlines())


def test_a_site_that_is_built_is_in_the_sdist_and_in_the_wheel(built):
    site = ROOT / "src/midstream/site"
    there = {path.relative_to(ROOT).as_posix() for path in site.rglob("*.html")}
    with tarfile.open(built[0]) as archive:
        assert there <= {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(built[1]) as archive:
        assert there <= {f"src/{name}" for name in archive.namelist()}


def test_the_range_of_vllm_has_every_release_that_was_checked_and_no_newer_minor(requirements):
    record = json.loads((ROOT / "docs" / "versions.json").read_text())["releases"]
    [found] = {one.specifier for one in requirements if one.name == "vllm"}
    assert [release for release in record if release not in found] == []
    newest = max(tuple(map(int, release.split("."))) for release in record)
    assert f"{newest[0]}.{newest[1]}.99" in found
    assert f"{newest[0]}.{newest[1] + 1}.0" not in found


def stub(folder: Path, name: str, version: str) -> Path:
    """A wheel without code or requirements."""
    stem = f"{name.replace('-', '_')}-{version}"
    file = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return file


def test_the_extra_vllm_keeps_a_newer_vllm_that_is_installed(built, requirements, tmp_path):
    """pip itself resolves the extra, among wheels without code."""
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for one in requirements:
        if one.name not in ("vllm", "midstream"):
            stub(wheels, one.name, "9999" if not one.specifier else _newest(one))
    stub(wheels, "vllm", "0.26.0")
    install(folder / "bin" / "python", "--no-index", stub(wheels, "vllm", "0.33.0"))
    wanted = f"midstream[vllm] @ {built[1].as_uri()}"
    # Without the machine's own settings of pip, which may name other folders of wheels.
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install",
            "--no-index", "--find-links", wheels, "--dry-run", wanted,
        ],
        capture_output=True, text=True, check=False,
        env={**others, "PIP_CONFIG_FILE": os.devnull},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    would = next(line for line in done.stdout.splitlines() if line.startswith("Would install"))
    assert "torch" in would
    assert "vllm" not in would


def _newest(requirement: Requirement) -> str:
    """Return a version that a requirement accepts."""
    found = {one.operator: one.version for one in requirement.specifier}
    return found.get(">=") or found["=="]
