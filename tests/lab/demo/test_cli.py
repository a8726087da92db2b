"""The command: help without vLLM, errors without tracebacks, quiet output."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.lab.demo import cli
from midstream.lab.report import command

SRC = Path(__file__).resolve().parents[3] / "src"


def run_python(*arguments, **environment):
    paths = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "100", **environment},
    )


@pytest.mark.engine  # starts processes
def test_help_says_all_options_and_imports_neither_vllm_nor_torch():
    code = (
        "import sys, midstream.lab.demo.cli as cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as end:\n    status = end.code\n"
        "heavy = {'vllm', 'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else status)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    for option in (
        "--model",
        "--layer",
        "--scales",
        "--max-tokens",
        "--out",
        "--seed",
        "--verbose",
    ):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scales", "nan"], "finite number, got nan"),
        (["--scales", "much"], "finite number, got much"),
        (["--scales", "1", "--layer"], "--layer' requires an argument"),
        (["--max-tokens", "0"], "'--max-tokens': .*2"),
        (["--lay"], "No such option: --lay"),
        (["model", "another"], "unexpected extra argument"),
    ],
)
def test_wrong_options_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.fixture
def called(monkeypatch):
    """The options of each call; the demo itself does not run."""
    options = []

    def record(given):
        options.append(given)
        return 0

    monkeypatch.setattr(command, "show", record)
    return options


@pytest.mark.parametrize(
    ("arguments", "scales"),
    [
        ([], command.DEFAULT_SCALES),
        (["--scales", "-2", "2"], (-2.0, 2.0)),
        (["--scales", "1"], (1.0,)),
        (["--scales", "-.5", "1e1", "--layer", "-1"], (-0.5, 10.0)),
        (["--scales=-2"], (-2.0,)),
    ],
)
def test_both_commands_take_several_scales_after_one_option(called, arguments, scales):
    from midstream.cli.app import app

    for run in (cli.main, lambda given: app(["demo", *given])):
        with pytest.raises(SystemExit) as end:
            run([*arguments, "--seed", "3", "--compile"])
        assert end.value.code == 0
    for name in ("scales", "seed", "compiled", "layer", "pairs", "questions", "classes"):
        assert getattr(called[0], name) == getattr(called[1], name)
    assert (called[0].scales, called[0].seed, called[0].compiled) == (scales, 3, True)
    assert called[0].layer == (-1 if "--layer" in arguments else None)


@pytest.mark.engine  # starts processes
@pytest.mark.parametrize("out", [".", "a-file/report.html"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, out):
    (tmp_path / "a-file").write_text("")
    done = run_python("-m", "midstream.lab.demo", "--model", "none", "--out", str(tmp_path / out))
    assert done.returncode == 1
    assert "error: --out" in done.stdout
    assert "starting vLLM" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


NOISE = """
import os, sys
from midstream import console as surroundings
with surroundings.quiet(verbose={verbose}) as console:
    print("python noise")
    sys.stderr.write("error noise\\n")
    os.write(1, b"noise from C\\n")
    os.write(2, b"more noise from C\\n")
    console.print("what matters")
    {ending}
print("after")
"""


@pytest.mark.engine  # starts processes
def test_noise_is_kept_away_unless_something_fails_or_it_is_wished_for():
    done = run_python("-c", NOISE.format(verbose=True, ending="pass"))
    assert "noise from C" in done.stdout
    assert "error noise" in done.stderr
    done = run_python("-c", NOISE.format(verbose=False, ending="pass"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "what matters\nafter\n"
    assert done.stderr == ""
    done = run_python("-c", NOISE.format(verbose=False, ending="raise RuntimeError('no luck')"))
    assert done.returncode == 1
    assert "end of the log before the failure:" in done.stdout
    for words in ("python noise", "error noise", "noise from C", "more noise from C"):
        assert words in done.stdout
    assert "RuntimeError: no luck" in done.stderr


@pytest.mark.engine  # starts processes
def test_a_user_s_own_settings_win():
    code = (
        "import os; from midstream import console as surroundings;"
        "always, quiet = surroundings.defaults(surroundings.ALWAYS), surroundings.quiet;\n"
        "with always, quiet(verbose=False) as console:\n"
        "    console.print(os.environ['VLLM_CPU_KVCACHE_SPACE'], os.environ['VLLM_LOGGING_LEVEL'])"
    )
    own = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_LOGGING_LEVEL": "INFO"}
    assert run_python("-c", code, **own).stdout == "3 INFO\n"


@pytest.mark.engine  # starts processes
def test_what_midstream_refuses_in_a_process_of_the_engines_is_told_by_its_own_words():
    ending = (
        "sys.stderr.write('(Worker pid=1) ERROR midstream.errors.ConfigError: layer 99\\n')\n"
        "    sys.stderr.write('(Worker pid=1) ERROR Exception: see above\\n')\n"
        "    raise RuntimeError('the engine could not start')"
    )
    done = run_python("-c", NOISE.format(verbose=False, ending=ending))
    assert done.stderr.splitlines()[-1] == "midstream.errors.ConfigError: layer 99"
    assert "the engine could not start" in done.stderr
    assert "what was logged" not in done.stdout
    ending = "raise __import__('midstream').StoreError('the disk is full')"
    done = run_python("-c", NOISE.format(verbose=False, ending=ending))
    assert done.stderr.splitlines()[-1] == "midstream.errors.StoreError: the disk is full"
    assert "noise" not in done.stdout + done.stderr
