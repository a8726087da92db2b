"""The command: light to import, its options, what it writes, and its exit status."""

import json
import os
import re
import subprocess
import sys

import pytest
from support.command import CliRunner

from midstream.cli import serve
from midstream.cli.app import app
from midstream.cli.command import as_argument, whole
from midstream.entries import COMMANDS, PROBE_COMMANDS, STORE_COMMANDS
from midstream.lab.tools.doctor import examine
from midstream.lab.tools.doctor.report import (
    LACKING,
    OK,
    REFUSED,
    UNBUILT,
    UNCOMPARED,
    WRONG,
    OperationFound,
    Report,
    SiteFound,
)

GOOD = Report(
    "some/model", "LlamaForCausalLM", "a random copy, 64 wide", OK,
    sites=(
        SiteFound("resid_pre", 0, OK, 1e-7),
        SiteFound("resid_pre", 1, OK, 3e-6),
        SiteFound("attn_out", 0, LACKING, None, "a Mamba layer has no attention"),
        SiteFound("mlp_out", 1, UNCOMPARED, None, "no module returns it"),
    ),
    operations=(OperationFound("Steer", "resid_pre", 1, OK, 2e-6),),
    tolerance=5e-4,
    compared_with="transformers",
    versions=(("midstream", "0"),),
)  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Calls the command with a doctor that finds this; what it was asked is kept."""
    asked: list[examine.Options] = []

    def call(report: Report, *arguments: str):
        def found(options: examine.Options) -> Report:
            asked.append(options)
            return report

        monkeypatch.setattr(examine, "examine", found)
        monkeypatch.setenv("COLUMNS", "200")
        result = CliRunner().invoke(app, ["doctor", "--verbose", *arguments])
        return result, asked

    return call


def test_each_sub_command_has_help_with_an_example_and_no_type_of_flags():
    outside = CliRunner().invoke(app, ["--help"]).output
    inside = CliRunner().invoke(app, ["store", "--help"]).output
    of_probes = CliRunner().invoke(app, ["probe", "--help"]).output
    for name, text, others in (
        *((name, outside, inside) for name in COMMANDS),
        *((name, inside, outside) for name in STORE_COMMANDS),
        *((name, of_probes, outside) for name in PROBE_COMMANDS),
    ):
        assert re.search(rf"^│ {name} ", text, re.M), name
        assert not re.search(rf"^│ {name} ", others, re.M), name
        groups = {
            **dict.fromkeys(STORE_COMMANDS, ["store"]),
            **dict.fromkeys(PROBE_COMMANDS, ["probe"]),
        }
        words = [*groups.get(name, []), name]
        shown = CliRunner().invoke(app, [*words, "--help"])
        assert shown.exit_code == 0
        assert f"Example: midstream {' '.join(words)} " in shown.output, name
        assert "bool" not in shown.output, name
        if name not in PROBE_COMMANDS:
            assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0, "as it was before"
    assert "bool" not in outside + inside


# What a person types, and what the answer must have.
MISTAKES = [
    (["steer"], "Steer(vector, layer=14)"),
    (["generate", "x"], "midstream studio MODEL"),
    (["plan", "--tokens", "1e9"], "--estimate"),
    (["store", "verfy", "x"], "verify"),
    (["studio"], "Missing argument 'MODEL'. Example: midstream studio org/model"),
    (["capture", "m"], "Missing option '--data'. Example: midstream capture "),
    (["store", "inspect"], "Missing argument 'DIR'. Example: midstream store inspect "),
    *(
        ([command, "/nope", *rest], "model: there is no folder '/nope'; expected a folder, or")
        for command, *rest in (
            ("doctor",),
            ("report",),
            ("serve", "--port", "1"),
            ("studio",),
            ("capture", "--data", "d.jsonl", "--out", "a"),
        )
    ),
    (["capture", "./m", "--data", "d.jsonl", "--out", "a", "--position", "x"], "no folder './m'"),
    (["capture", "m", "--data", "none.jsonl", "--out", "a"], "data: none.jsonl: it has no lines"),
    (["capture", "m", "--data", "t.csv", "--out", "a"], "data: t.csv: it has no lines"),
    (["capture", "m", "--data", "w.csv", "--out", "a", "--text-column", "body"], "has id, text"),
    (["capture", "m", "--data", "w.csv", "--out", "a", "--column", "txt"], "did you mean `text`"),
    (["capture", "m", "--data", "w.csv", "--out", "a", "--roles"], "roles: only conversations"),
    (["capture", "m", "--data", "w.csv", "--out", "a", "--pack", "1"], "at least 2"),
    (
        ["capture", "m", "--data", "w.csv", "--out", "a", "--pack", "9", "--max-tokens", "2"],
        "max_tokens: packed prompts are not answered",
    ),
    (["capture", "m", "--data", "w.csv", "--out", "a", "--exclude", "last"], "exclude: "),
    (
        ["capture", "m", "--data", "w.csv", "--out", "a", "--chat-template", "x"],
        "--chat-template requires --chat",
    ),
    (
        ["capture", "m", "--data", "w.csv", "--out", "a", "--chat", "--chat-template", "x"],
        "--chat-template x: cannot be read: ",
    ),
    (["capture", "./m", "--data", "w.csv", "--out", "a", "--pack", "9"], "no folder './m'"),
    (["capture", "m", "--data", "q.jsonl", "--out", "a"], "--prompt-field (`column`) names"),
    (["capture", "m", "--data", "plain.jsonl", "--out", "a"], "line 1: expected JSON"),
    (["capture", "m", "--data", "d.jsonl", "--out", "a", "--limit", "many"], "such as 2000 or 2e3"),
    (["capture", "m", "--data", "d.jsonl", "--out", "a", "--limit", "1.5"], "such as 2000 or 2e3"),
    (["capture", "m", "--data", "d.jsonl", "--out", "a", "--layre", "1"], "Possible options"),
    (["capture", "--model"], "expected a folder or a name"),
    (["sweep", "p", "--source", "s", "--metric", "kl"], "--model"),
    (["sweep", "m", "p", "--source", "s", "--metric", "kl", "--out", "x.csv"], ".json"),
    (["store", "inspect", "."], "no store: it has no shards (*.safetensors), but"),
    (["inspect", "."], "no store"),
    (["verify", "."], "no store"),
    (["prune", "."], "no store"),
    (["merge", ".", "--into", "b"], "no store"),
    (["export", ".", "out", "--to", "npz"], "no store"),
    (["export", ".", "--out", "out", "--to", "npz"], "no store"),
    (["guard", "put", "a", "no.json", "--above", "1"], "probe: there is no file 'no.json'"),
    (["replay", "none"], "error: none: No such file or directory"),
]


@pytest.mark.parametrize(("typed", "said"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_a_mistake_is_answered_before_any_work(typed, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "w.csv").write_text("id,text\n1,The sky\n")
    (tmp_path / "plain.jsonl").write_text("The sky is blue.\nGrass is green.\n")
    (tmp_path / "d.jsonl").write_text('{"text": "The sky"}\n')
    (tmp_path / "q.jsonl").write_text('{"prompt": "The sky"}\n')
    for empty in ("none.jsonl", "t.csv"):
        (tmp_path / empty).touch()
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_an_argument_may_be_an_option_and_numbers_have_an_exponent(monkeypatch):
    for typed, option, is_first, meant in (
        ("a --model m --x", "--model", True, "m a --x"),
        ("--model=m -- --model n", "--model", True, "m -- --model n"),
        ("--out o acts --to npz", "--out", False, "acts --to npz o"),
        ("--out=o -- acts", "--out", False, "-- acts o"),
    ):
        assert as_argument(typed.split(), option, is_first) == meant.split()
    assert [whole()(text) for text in ("1e9", "2.5e3", "100_000", 7)] == [10**9, 2500, 100_000, 7]
    asked = []
    monkeypatch.setattr(serve.os, "execv", lambda _, words: asked.append(words))
    for words in (["m"], ["--model", "m"], ["--port", "1", "--model=m"]):
        result = CliRunner().invoke(app, ["serve", *words, "--site", "z", "--layer", "3"])
        assert result.exit_code == 0, result.output
    assert all('"sites": ["z"], "layers": [3]' in words[-1] for words in asked)
    assert all("m" in words and "--model=m" not in words for words in asked)


def test_its_environment_is_gone_when_it_ends_and_never_replaces_what_is_set(monkeypatch):
    """A process that calls it goes on: with nothing compiled, were this to stay."""
    seen: dict[str, str] = {}

    def look(options: examine.Options) -> Report:
        seen.update(os.environ)
        return GOOD

    monkeypatch.setattr(examine, "examine", look)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    before = dict(os.environ)
    assert CliRunner().invoke(app, ["doctor", "some/model"]).exit_code == 0
    assert (seen["TORCH_COMPILE_DISABLE"], seen["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "3")
    assert dict(os.environ) == before


def test_what_is_found_is_printed_with_a_verdict(run):
    result, _ = run(GOOD, "some/model")
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert "resid_pre │ 0–1 │ ok │ 3.0e-06" in said
    assert "a Mamba layer has no attention" in said
    assert "ok: 2 taps and 1 operations match transformers" in said
    assert "1 do not exist in this model; 1 could not be compared" in said


@pytest.mark.parametrize(
    ("outcome", "status", "word"),
    [
        (WRONG, 1, "wrong: "),
        (REFUSED, 2, "not supported: "),
        (UNBUILT, 2, "cannot be built here: "),
        (UNCOMPARED, 2, "not compared: "),
    ],
)
def test_the_exit_status_says_what_kind_of_outcome_it_is(run, outcome, status, word):
    result, _ = run(Report("m", "", "a copy", outcome, "because of this"), "m")
    assert result.exit_code == status
    assert word + "because of this" in result.output


def test_json_goes_to_a_file_or_alone_to_the_standard_output(run, tmp_path):
    result, _ = run(GOOD, "some/model", "--json", "-")
    assert json.loads(result.stdout)["sites"][1]["error"] == 3e-6
    target = tmp_path / "found.json"
    run(GOOD, "some/model", "--json", str(target))
    read = json.loads(target.read_text())
    assert read["outcome"] == "ok"
    assert read["worst"] == 3e-6
    assert read["versions"] == {"midstream": "0"}


def test_options_say_how_small_and_which_dtype(run):
    _, asked = run(GOOD, "m", "--layers", "2", "--hidden", "128", "--dtype", "bfloat16")
    run(GOOD, "m", "--full")
    assert asked[0].size is not None
    assert (asked[0].size.layers, asked[0].size.hidden, asked[0].dtype) == (2, 128, "bfloat16")
    assert asked[1].size is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("m", "--hidden", "100"), "multiple of 64"),
        (("m", "--dtype", "int8"), "expected one of float32"),
        (("m", "--json", "/nowhere/at/all.json"), "cannot be written"),
        ((), "either a MODEL or"),
    ],
)
def test_wrong_options_are_refused_before_any_work(run, arguments, said):
    result, asked = run(GOOD, *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert asked == []


@pytest.mark.engine  # starts processes
def test_python_m_midstream_is_the_same_command_and_light_to_import():
    code = (
        "import sys, runpy; sys.argv = ['midstream', 'doctor', '--help']\n"
        "try: runpy.run_module('midstream', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "reads and edits of a model" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
