"""The client in an environment that has its extra's packages alone: neither torch nor vLLM."""

from __future__ import annotations

import base64
import json
import subprocess
import venv
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from midstream.results.activations import Activations
from midstream.results.receipt import Receipt
from midstream.results.serialization import pack

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import http.server, json, sys, threading
import midstream
from midstream import Capture, Client, Probe

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


def needed(package: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Names of a package's requirements, and of theirs."""
    found: set[str] = set()
    for line in metadata.requires(package) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            continue
        if requirement.name not in found:
            found |= {requirement.name, *needed(requirement.name)}
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that finds midstream and what `midstream[client]` requires, and nothing else."""
    folder = tmp_path_factory.mktemp("client") / "env"
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in needed("midstream", ("client",)):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in (".", "..") and not (site / top).exists():
                (site / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    (site / "midstream").symlink_to(ROOT / "src" / "midstream")
    return folder / "bin" / "python"


def run(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, "-I", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def answer(tmp_path: Path, codec_of: torch.dtype) -> tuple[Path, torch.Tensor]:
    rows = torch.arange(6, dtype=codec_of).reshape(2, 3) / 8
    positions = torch.tensor([0, 2])
    packed = pack(
        Activations({("resid_post", 1): rows}, {("resid_post", 1): positions}, [7, 8, 9]),
        3,
        codec_of,
    )
    field = {
        "activations": {"base64": base64.b64encode(packed).decode()},
        "receipt": Receipt("x", 2, 1, (), None).to_dict(),
        "probes": {"p": {"scores": [0.5], "positions": [2], "token_ids": [9]}},
    }
    choice = {"index": 0, "text": "b", "finish_reason": "stop", "midstream": field}
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"id": "x", "choices": [choice]}))
    return file, rows


def test_neither_torch_nor_vllm_is_there(python):
    for name in ("torch", "vllm"):
        done = subprocess.run([python, "-I", "-c", f"import {name}"], capture_output=True)
        assert done.returncode != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_and_scores_are_arrays_of_numpy(python, tmp_path, dtype):
    file, rows = answer(tmp_path, dtype)
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


def test_the_command_says_its_help(python):
    assert "capture" in run(python, "-m", "midstream", "--help")


def test_every_public_name_of_a_request_is_there(python):
    names = "Capture, Steer, Probe, Plan, Vector, Client, AsyncClient, extra_body, Receipt"
    run(python, "-c", f"from midstream import {names}")
