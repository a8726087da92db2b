"""`midstream report`: its options, and what it says of wrong ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command import CliRunner

from midstream.cli.app import app
from midstream.lab.demo.prompts import QUESTIONS
from midstream.lab.report import command
from midstream.lab.report.pairs import Pair

PAIRS = [Pair("up", "down"), Pair("left", "right")]
Run = Callable[..., Any]


@pytest.fixture
def called(monkeypatch):
    """The options of each call; no report is made."""
    options = []
    monkeypatch.setattr(command, "show", lambda given: options.append(given) or 0)
    return options


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command in a folder with files of pairs and questions."""
    lines = [json.dumps(pair._asdict()) for pair in PAIRS]
    files = {
        "pairs.jsonl": "\n".join(lines),
        "up.txt": "up\nleft\n",
        "down.txt": "down\nright\n",
        "short.txt": "down\n",
        "questions.txt": "How?\nWhy?\n",
        "bad.jsonl": f"{lines[0]}\n{{}}\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: CliRunner().invoke(app, ["report", *arguments])


@pytest.mark.parametrize(
    "files", [["--pairs", "pairs.jsonl"], ["--positive", "up.txt", "--negative", "down.txt"]]
)
def test_pairs_are_of_one_file_or_of_two(run, called, files):
    done = run("--model", "m", *files)
    assert done.exit_code == 0, done.output
    assert called[0].pairs == PAIRS
    assert called[0].questions == QUESTIONS
    assert called[0].classes == ("positive", "negative")
    assert called[0].scales == command.DEFAULT_SCALES


def test_all_options_are_passed_on(run, called):
    arguments = (
        "--model m --pairs pairs.jsonl --questions questions.txt --classes up down --layer 3"
    )
    arguments += " --scales -4 4 --max-tokens 9 --max-length 99 --seed 5 --out x.html --compile"
    assert run(*arguments.split()).exit_code == 0
    given = called[0]
    assert (given.questions, given.classes, given.layer) == (["How?", "Why?"], ("up", "down"), 3)
    assert (given.scales, given.max_tokens, given.max_length) == ((-4.0, 4.0), 9, 99)
    assert (given.seed, given.out, given.compiled) == (5, Path("x.html"), True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pairs pairs.jsonl", "Missing argument 'MODEL'"),
        ("--model m", "expected --pairs FILE, or --positive FILE and --negative FILE"),
        ("--model m --positive up.txt", "expected --pairs FILE, or --positive FILE"),
        ("--model m --pairs pairs.jsonl --positive up.txt", "expected --pairs FILE, or"),
        ("--model m --pairs none.jsonl", "none.jsonl: cannot be read: No such file"),
        ("--model m --pairs bad.jsonl", "bad.jsonl:2: missing field `positive`"),
        ("--model m --positive up.txt --negative short.txt", "short.txt: expected 2 lines"),
        ("--model m --pairs pairs.jsonl --scales nan", "expected a finite number, got nan"),
    ],
)
def test_wrong_options_and_files_end_with_status_2(run, called, arguments, message):
    done = run(*arguments.split())
    assert done.exit_code == 2
    assert message in done.output
    assert called == []


def test_a_name_of_a_model_is_passed_on_and_a_folder_is_checked(run, called, tmp_path):
    from contextlib import nullcontext

    from midstream.errors import ModelError

    stages = lambda _words: nullcontext()  # noqa: E731
    run("--model", "org/name", "--pairs", "pairs.jsonl")
    assert called[0].find_model(stages) == "org/name"
    assert not called[0].is_offline
    run("--model", str(tmp_path), "--pairs", "pairs.jsonl")
    assert called[1].is_offline
    with pytest.raises(ModelError, match="expected a Hugging Face model folder"):
        called[1].find_model(stages)
    (tmp_path / "config.json").write_text("{}")
    assert called[1].find_model(stages) == str(tmp_path)


def test_an_engine_that_cannot_start_is_one_line(run, monkeypatch):
    def failing(*_, **__):
        raise ValueError("2 validation errors\n  too long")

    monkeypatch.setattr("midstream.lab.report.engine.MidstreamEngine", failing)
    done = run("--model", "m", "--pairs", "pairs.jsonl")
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 1
    assert "error: ValueError: 2 validation errors too long" in done.output
