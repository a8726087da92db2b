"""`midstream serve` starts vLLM's server so that it has midstream, or not at all."""

import json
import os

import pytest
from support.command import CliRunner

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
    monkeypatch.setattr(serve, "_server", lambda model, given: ["server", model])
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
    settings = {"sites": ["resid_post", "mlp_out"], "layers": [1, 2]}
    assert words[6:8] == ["--dtype=float32", "--additional-config"]
    assert json.loads(words[8]) == {"other": 1, "midstream": settings}
    assert len(words) == 9


def config_of(started):
    [(words, _)] = started
    assert words.count("--additional-config") == 1
    return json.loads(words[words.index("--additional-config") + 1])


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
@pytest.mark.parametrize("key", ["additional-config", "additional_config"])
def test_settings_of_a_config_file_are_kept_and_options_take_precedence_field_by_field(
    started, tmp_path, form, key
):
    file = tmp_path / "server.yaml"
    file.write_text(
        f"port: 8001\n{key}:\n  other: 1\n  midstream:\n    probes: 2\n"
        "    http: {admin: false, held_seconds: 9}\n"
    )
    settings = '{"probes": 3, "http": {"held_seconds": 5}}'
    words = form.format(file).split()
    result = run("m", *words, "--layers", "1", "--settings", settings)
    assert result.exit_code == 0, result.output
    http = {"admin": False, "held_seconds": 5}
    assert config_of(started) == {
        "other": 1,
        "midstream": {"probes": 3, "http": http, "layers": [1]},
    }
    # vLLM reads the file only where it is a word of its own.
    [(given, _)] = started
    assert given[given.index("--config") + 1] == str(file)


def test_a_config_file_may_have_the_settings_as_text_beside_those_of_the_command_line(
    started, tmp_path
):
    file = tmp_path / "server.yaml"
    file.write_text('additional-config: \'{"a": 1, "midstream": {"http": false}}\'\n')
    assert run("m", "--config", str(file), "--additional-conf", '{"b": 2}').exit_code == 0
    assert config_of(started) == {"a": 1, "b": 2, "midstream": {"http": False}}


@pytest.mark.parametrize(
    "words",
    [
        ["-ac", '{"b": 2}'],
        ['-ac={"b": 2}'],
        ["--ad", '{"b": 2}'],
        ['--addit={"b": 2}'],
        ["--additional_con", '{"b": 2}'],
    ],
)
def test_an_additional_config_by_a_short_name_is_kept(started, words):
    assert run("m", *words, "--layers", "1").exit_code == 0
    assert config_of(started) == {"b": 2, "midstream": {"layers": [1]}}
    [(given, _)] = started
    assert not set(words) & set(given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("additional-config: [1]", "expected a JSON object"),
        ("additional-config: {midstream: 1}", "an object of settings as 'midstream'"),
        ("additional-config: {midstream: {htttp: 1}}", "htttp"),
        ("additional-config.midstream.http.admin: false", "additional-config.midstream"),
        ("- 1", "expected options and their values"),
        ("{", "cannot be read"),
    ],
)
def test_a_config_file_that_is_wrong_is_named_and_nothing_starts(started, tmp_path, text, said):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    result = run("m", "--config", str(file))
    assert result.exit_code == 2
    assert said in " ".join((result.output + result.stderr).replace("│", " ").split())
    assert not started


@pytest.mark.parametrize(
    "words", [["--api-server-count=2"], ["-asc", "2"], ["--api_server_count=2"]]
)
def test_several_api_servers_are_started_also_by_builds_without_metadata(monkeypatch, words):
    def version(name):
        raise serve.PackageNotFoundError(name)

    monkeypatch.setattr(serve, "version", version)
    monkeypatch.setattr(serve.MissingExtraError, "require", lambda *names: None)
    assert serve._server("m", words) == ["midstream.cli.vllm_serve", "serve", "m"]
    assert serve._server("m", ["--port=1"])[0] == "vllm.entrypoints.openai.api_server"
    monkeypatch.setattr(serve, "version", lambda name: "1")
    assert serve._server("m", words) == ["vllm.entrypoints.cli.main", "serve", "m"]


def test_replicas_in_a_config_file_get_one_server_too(started, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("data-parallel-size: 2\n")
    assert run("m", "--config", str(file)).exit_code == 0
    [(words, _)] = started
    assert words[-2:] == ["--api-server-count", "1"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--port", "8001"], 0),
        (["--data-parallel-size", "2"], 1),
        (["--data_parallel_size=2"], 1),
        (["-dp", "2"], 1),
        (["-dp", "2", "--api-server-count=2"], 0),
        (["-dp", "2", "--api-server", "4"], 0),
        (["-dp", "2", "--api_s=4"], 0),
        (["-dp", "2", "--headless"], 0),
        (["-dp", "2", "--headl"], 0),
        (["-dp", "2", "--api-key", "k", "--hf-token", "t"], 1),
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
        (["--settings", '{"sinks": {"stoer": {}}}'], "stoer"),
        (["--settings", '{"events": {"jsonl": {"path": "/no/such/file"}}}'], "/no/such/file"),
        (["--layers", "a"], "--layers"),
        (["--additional-config", '{"midstream": {}}'], "--additional-config"),
        (["--additional-config"], "--additional-config"),
        (["--additional-config.midstream.http.admin=true"], "--additional-config"),
        (["--addi.other", "1"], "--additional-config"),
        (["-ac.other", "1"], "--additional-config"),
        (["-ac", '{"midstream": {}}'], "--additional-config"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
        (["--config"], "--config"),
        (["--sites", "resid_past"], "resid_past"),
        (["--settings", '{"http": {"inline_bites": 1}}'], "http: unknown field 'inline_bites'"),
        (["--vectors", "x.npz"], "expected NAME=FILE, got 'x.npz'"),
        (["--vectors", f"a b={__file__}"], "midstream.vectors: name 'a b'"),
        (["--vectors", "a=no.npz"], "--vectors a: there is no file 'no.npz'"),
        *(
            ([typed, "x"], f"no such option: {typed}; did you mean {meant}?")
            for typed, meant in (
                ("--setting", "--settings"),
                ("--vector", "--vectors"),
                ("--sink", "--sinks"),
                ("--steer", "--steering"),
                ("--layer-s", "--layers"),
            )
        ),
        (["--steering", '{"all": "a"}'], "midstream.steering: unknown field 'all'"),
        (["--steering", "base"], "--steering: expected JSON, got 'base'"),
        (["--sinks", "filesystem:root"], "root"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_starts(started, words, said):
    result = run("m", *words)
    assert result.exit_code == 2
    assert said in " ".join((result.output + result.stderr).replace("│", " ").split())
    assert not started


def test_vectors_and_steering_are_settings_too(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x=1.npz", "y.gguf"):
        (tmp_path / name).touch()
    words = ("--vectors", "a=x=1.npz", "--vectors", "b/c=y.gguf")
    assert run("m", *words, "--steering", '{"base": ["a", 2.0]}').exit_code == 0
    assert config_of(started)["midstream"] == {
        "vectors": {"a": "x=1.npz", "b/c": "y.gguf"},
        "steering": {"base": ["a", 2.0]},
    }


def test_a_tier_of_an_option_replaces_that_of_a_config_file_whole(started, tmp_path):
    file, vectors = tmp_path / "server.yaml", tmp_path / "b.npz"
    vectors.touch()
    file.write_text(
        "additional-config:\n  midstream:\n    vectors: {a: a.npz}\n"
        "    steering: {base: {op: scale, factor: 2, layer: 1}, prompt: a}\n"
    )
    words = ("--vectors", f"b={vectors}", "--steering", '{"base": {"1": [1.0, 2.0]}}')
    assert run("m", "--config", str(file), *words).exit_code == 0
    assert config_of(started)["midstream"] == {
        "vectors": {"a": "a.npz", "b": str(vectors)},
        "steering": {"base": {"1": [1.0, 2.0]}, "prompt": "a"},
    }


@pytest.mark.parametrize("flag", ["--sinks", "--capture-consumers"])
def test_sinks_are_options_beside_those_of_the_settings(started, flag):
    settings = json.dumps({"sinks": {"log": {}, "npz": {"root": "old"}}})
    words = (flag, "filesystem:root=/srv/acts", flag, "npz:root=new", flag, "mine:class=a.b:C,k=3")
    assert run("m", "--settings", settings, *words).exit_code == 0
    [(words, _)] = started
    given = json.loads(words[words.index("--additional-config") + 1])["midstream"]
    assert given["sinks"] == {
        "log": {},
        "npz": {"root": "new"},
        "filesystem": {"root": "/srv/acts"},
        "mine": {"class": "a.b:C", "k": 3},
    }


def test_captures_of_every_request_may_have_no_sink(started):
    settings = {"sinks": {"memory": {"capture": {"layers": "all"}}}}
    assert run("m", "--settings", json.dumps(settings)).exit_code == 0
    [(words, _)] = started
    given = json.loads(words[words.index("--additional-config") + 1])["midstream"]
    assert given["sinks"] == settings["sinks"]
