"""What the guide to serving shows runs, in order, against the server that it starts."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import serving
from support.pages import blocks
from support.serving import Running

PAGE = "docs/serving.md"
ADDRESS = "127.0.0.1:8000"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# What the page does not say, and what makes a start short.
QUICK = (
    *("--enforce-eager", "--dtype=float32", "--max-model-len=256", "--max-num-seqs=8"),
    "--num-gpu-blocks-override=64",
)


GUARDS = "docs/guards.md"


def snippets(page: str = PAGE) -> list[tuple[int, str, str]]:
    """(line, language, text) of each block of Python or of a shell."""
    return blocks(page, ["python", "bash"])


def starts(word: str) -> list[str]:
    [text] = [text for _, _, text in snippets() if text.startswith(f"{word} serve ")]
    return shlex.split(text.replace("\\\n", ""))


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("docs")
    (found / MODEL).parent.mkdir()
    (found / MODEL).symlink_to(smollm2)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    words = starts("midstream")
    at = words.index("--port")
    assert words[at + 1] == ADDRESS.partition(":")[2]
    words = [*words[:at], *words[at + 2 :]]
    with serving.running(["-m", *words, *QUICK], folder) as found:
        yield found


def test_what_midstream_serve_comes_to_is_the_vllm_serve_that_the_page_shows(monkeypatch):
    from midstream.cli import serve
    from midstream.cli.app import app

    run: list[list[str]] = []

    def note(_: str, words: list[str]) -> None:
        run.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", note)
    monkeypatch.setattr(serve, "_server", lambda model, rest: ["vllm", "serve", model])
    with pytest.raises(SystemExit):
        app(starts("midstream")[1:])
    mine, theirs = run[0][2:], starts("vllm")
    assert mine[:-1] == theirs[:-1]
    assert json.loads(mine[-1]) == json.loads(theirs[-1])


@pytest.mark.nightly
def test_the_example_of_a_client_steers_the_server_and_leaves_it_as_it_was(server, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    example = importlib.import_module("steering_client")
    answers = example.main(["--url", server.url])
    plain, *steered, after = answers.values()
    assert after == plain
    assert len(set(steered)) == 1, "by request, by name and for every request are the same"
    assert plain not in steered


def run_page(page: str, server: Running) -> tuple[list[str], dict[str, Any]]:
    """Run the snippets of a page; return what the commands printed, and the names of Python."""
    address = server.url.removeprefix("http://")
    bin_folder = str(Path(sys.executable).parent)
    environment = serving.environment(PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = []
    for line, language, text in snippets(page):
        if text.startswith(("midstream serve ", "vllm serve ")):
            continue
        said = text.replace(ADDRESS, address)
        if language == "python":
            exec(compile("\n" * line + said, page, "exec"), namespace)
        else:
            done = subprocess.run(
                ["bash", "-euc", said], env=environment, capture_output=True, text=True,
                timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"line {line}: {done.stdout}{done.stderr}"
            ran.append(done.stdout)
    return ran, namespace


@pytest.mark.nightly
def test_the_page_of_guards_runs_from_data_to_a_guard_that_stops_and_back(
    server, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    (listed,), names = run_page(GUARDS, server)
    said = capsys.readouterr().out
    assert said.startswith("1 shadow\n[{'guard': 'anger', 'version': 3, 'action': 'flag', ")
    assert "The answer was stopped. content_filter\n1 put 127.0.0.1 20" in said
    assert (names["out"].text, names["guard"]["version"]) == ("The answer was stopped.", 1)
    lines = listed.splitlines()
    assert lines[0].startswith("anger version 7: shadow above ")
    assert lines[1].startswith("anger version 8: flag above ")
    assert lines[-2].startswith("version 8: flag above ")
    assert lines[-1] == "anger is deleted"
    assert server.get("/v1/midstream/guards") == {"guards": []}


@pytest.mark.nightly
def test_the_snippets_of_the_page_run_one_after_the_other(server, folder, monkeypatch):
    monkeypatch.chdir(folder)
    epoch = server.status()["steering"]["epoch"]
    ran, _ = run_page(PAGE, server)
    assert '"base64"' in ran[0]
    assert '"status":"ok"' in ran[1].replace(" ", "")
    assert "base64" not in ran[1]
    status = server.status()
    assert status["held"]["captures"] == 0
    assert status["steering"]["epoch"] == epoch + 2
    assert status["vectors"] == 0
