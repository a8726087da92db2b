"""`midstream plan`: what it prints, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.command import CliRunner

from midstream.cli.app import app

MODEL = ("--model", "llama-70b", "--tp", "8", "--tokens", "1000000000")


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_it_says_bytes_time_what_saturates_first_and_what_to_choose():
    result = run(*MODEL)
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert "llama-70b: 80 layers of 8,192, bfloat16, 70.6 B weights" in said
    assert "1,000,000,000 tokens in requests of 512; resid_post at 80 layers: 80 rows" in said
    assert "1 engine of 8 GPUs (TP 8, PP 1) on 1 machine of 8" in said
    assert "raw gathered 16,384 1.31 MB 1.31 PB" in said
    assert "topk8:k=64 sharded 200 16.0 kB" in said
    assert said.count("bottleneck") >= 2
    assert "recommended: rp8:k=512,seed=0, sharded" in said
    for basis in ("measured", "derived", "assumed"):
        assert basis in said
    assert "given" not in said


def test_json_has_the_same_and_nothing_else():
    result = run(*MODEL, "--codec", "full8", "--return", "sharded", "--json")
    found = json.loads(result.stdout)
    (load,) = found["loads"]
    assert (load["codec"], load["return"], load["row_bytes"]) == ("full8", "sharded", 8200)
    assert load["rank_bytes_per_token"] == [[82000.0] * 8]
    assert load["bytes_per_token"] == 80 * 8200
    assert load["seconds"] == pytest.approx(1e9 / load["tokens_per_second"])
    shares = {one["name"]: one["share"] for one in load["resources"]}
    assert load["saturates_first"] == max(shares, key=shares.__getitem__)
    assert found["advice"]["codec"] == "full8"
    assert found["model"]["num_layers"] == len(found["job"]["taps"]) == 80
    assert found["rates"]["bus"]["basis"] == "measured"


def test_what_is_given_takes_the_place_of_what_is_assumed_and_says_so():
    given = ("--writer", "60", "--network", "100", "--store", "500", "--tokens-per-second", "9000")
    found = json.loads(run(*MODEL, *given, "--json").stdout)
    rates = {name: (one["value"], one["basis"]) for name, one in found["rates"].items()}
    assert rates["writer"] == (60e9, "given")
    assert rates["network"] == (100e9, "given")
    assert rates["store"] == (500e9, "given")
    assert rates["engine"] == (9000.0, "given")
    assert "gpu_flops" not in rates
    assert "efficiency" not in rates


def test_a_configuration_s_folder_is_read_and_positions_are_a_share(tmp_path):
    config = {"hidden_size": 64, "num_hidden_layers": 4, "model_type": "odd"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("--model", str(tmp_path), "--tokens", "1000", "--layers", "1,-1")
    refused = run(*asked)
    assert refused.exit_code == 2
    assert "tokens_per_second: required for" in refused.output
    result = run(*asked, "--tokens-per-second", "1e5", "--fraction", "0.5", "--json")
    load = json.loads(result.stdout)["loads"][0]
    assert (load["rows_per_token"], load["bytes_per_token"]) == (1.0, 128.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "llama-7b"), "model: expected one of"),
        (("--layers", "80"), "out of range: the model has 80 layers"),
        (("--layers", "some"), 'layers: expected "all"'),
        (("--sites", "resid"), "sites"),
        (("--codec", "zip"), "codec: expected one of"),
        (("--codec", "topk8:k=9000"), "codec.k: expected at most 8192"),
        (("--return", "both"), "return: expected"),
        (("--tp", "3"), "tp: expected a divisor"),
        (("--nodes", "3", "--pp", "2"), "nodes: 3 machines have 24 GPUs"),
        (("--tokens", "0"), "tokens: expected an integer of at least 1"),
        (("--fraction", "2"), "fraction: expected a number"),
        (("--bus", "0"), "bus: expected a number above 0"),
        (("--dtype", "int8"), "dtype: expected auto"),
    ],
)
def test_wrong_options_are_refused_with_what_would_be_right(arguments, said):
    result = run(*MODEL, *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    as_json = run(*MODEL, *arguments, "--json")
    assert as_json.exit_code == 2
    found = json.loads(as_json.stdout)
    assert (found["status"], said in found["error"]) == (2, True)


@pytest.mark.engine
def test_it_imports_no_vllm_and_no_transformers():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from midstream.cli.app import app\n"
        f"assert CliRunner().invoke(app, ['plan', *{MODEL!r}]).exit_code == 0\n"
        "print([name for name in ('vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_its_help_names_every_model_that_is_built_in():
    from midstream.tools.capacity import NAMED

    said = " ".join(
        CliRunner(env={"COLUMNS": "300"}).invoke(app, ["plan", "--help"]).output.split()
    )
    assert all(name in said for name in NAMED)
