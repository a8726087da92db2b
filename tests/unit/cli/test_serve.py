"""`midstream serve` starts vLLM's server so that it has midstream, or not at all."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from midstream.cli import serve
from midstream.cli.app import app


@pytest.fixture
def started(monkeypatch):
    """The commands that would have taken this process's place."""
    found = []

    def note(_, words):
        found.append((words, os.environ.get("VLLM_PLUGINS")))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", note)
    monkeypatch.setattr(serve, "_server", lambda model: ["server", model])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return found


def run(*words):
    return CliRunner().invoke(app, ["serve", *words])


@pytest.mark.parametrize(
    ("given", "then"),
    [
        (None, None),
        ("", "midstream"),
        ("another", "another,midstream"),
        ("midstream", "midstream"),
        ("another,midstream", "another,midstream"),
    ],
)
def test_vllm_is_told_to_load_it_where_it_loads_named_plugins_only(
    started, monkeypatch, given, then
):
    if given is not None:
        monkeypatch.setenv("VLLM_PLUGINS", given)
    assert run("m").exit_code == 0
    [(_, plugins)] = started
    assert plugins == then


def test_it_is_refused_where_vllm_could_not_find_it(started, monkeypatch):
    monkeypatch.setattr(serve, "entry_points", lambda **_: ())
    result = run("m")
    assert result.exit_code == 2
    assert "not installed as a package" in result.stderr
    assert not started


def test_what_is_not_midstreams_is_passed_on_with_the_settings_among_it(started):
    result = run(
        "m", "--port", "8001", "--sites", "resid_post,mlp_out", "--layers", "1,2",
        "--additional-config", '{"other": 1}', "--dtype=float32",
    )  # fmt: skip
    assert result.exit_code == 0
    [(words, _)] = started
    assert words[1:6] == ["-m", "server", "m", "--port", "8001"]
    at = words.index("--additional-config")
    settings = {"sites": ["resid_post", "mlp_out"], "layers": [1, 2]}
    assert json.loads(words[at + 1]) == {"other": 1, "midstream": settings}
    assert words[at + 2 :] == ["--dtype=float32"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--port", "8001"], 0),
        (["--data-parallel-size", "2"], 1),
        (["--data_parallel_size=2"], 1),
        (["-dp", "2"], 1),
        (["-dp", "2", "--api-server-count=2"], 0),
        (["-dp", "2", "--headless"], 0),
    ],
)
def test_with_replicas_one_server_is_started_unless_another_number_is_asked_for(
    started, words, count
):
    assert run("m", *words).exit_code == 0
    [(given, _)] = started
    at = given.index("--additional-config") + 2
    assert given[at:] == ["--api-server-count", "1"] * count


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--settings", "[1]"], "--settings"),
        (["--settings", '{"sitess": []}'], "sitess"),
        (["--layers", "a"], "--layers"),
        (["--additional-config", '{"midstream": {}}'], "--additional-config"),
        (["--additional-config"], "--additional-config"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_starts(started, words, said):
    result = run("m", *words)
    assert result.exit_code == 2
    assert said in result.output + result.stderr
    assert not started
