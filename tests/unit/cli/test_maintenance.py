"""The sub-commands that look at a store, and keep it: inspect, export, verify, merge, prune."""

import json
import os
import time
from pathlib import Path

import pytest
from support.command import CliRunner
from typer import testing
from unit.store.making import entry, header, write

from midstream import open_store
from midstream.cli.app import app


@pytest.fixture
def acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three requests in two shards, in the folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write("acts", [entry("a", tag="x", metadata={"line": 1}), entry("b", rows=5, seed=3)])
    write("acts", [entry("c", tag="x", rows=2, seed=6)])
    return tmp_path / "acts"


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.stdout


def run_json(*arguments: str, status: int = 0):
    return json.loads(run(*arguments, "--json", status=status))


def damage(root: Path) -> Path:
    path = sorted(root.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "nowhere"],
        ["verify", "nowhere"],
        ["export", "nowhere", "out", "--to", "npz"],
        ["merge", "nowhere", "--into", "into"],
        ["prune", "nowhere"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_store_that_is_not_there_is_refused_by_each(acts, arguments):
    assert "nowhere" in run_json(*arguments, status=2)["error"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "error: nowhere: no such store" in result.stderr


def test_inspect_shows_what_there_is(acts):
    said = " ".join(run("inspect", "acts").split())
    assert "acts: 3 requests, 30 rows" in said
    assert "in 2 shards" in said
    assert "acme/tiny at abc: 8 wide, bfloat16, codec raw; vLLM 0.32.0, midstream 0.1.0" in said
    assert "prompts of 2 to 2 tokens" in said
    assert "resid_pre │ 0 │ 10" in said
    assert "resid_post │ 0, 3 │ 20" in said
    assert "x │ 2" in said
    assert "(none) │ 1" in said


def test_inspect_says_the_same_to_machines(acts):
    found = run_json("inspect", "acts")
    assert (found["requests"], found["rows"], found["shards"]) == (3, 30, 2)
    assert found["nbytes"] == sum(path.stat().st_size for path in acts.glob("*.safetensors"))
    assert found["tags"] == {"x": 2, "": 1}
    assert [each["codec"] for each in found["headers"]] == ["raw"]
    resid_post = {"site": "resid_post", "layers": [0, 3], "rows": 20, "widths": [8]}
    assert found["sites"][1] == resid_post
    assert found["prompt_tokens"] == [2, 2, 2]


def test_inspect_of_an_empty_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").mkdir()
    assert run("inspect", "none").strip() == "none: 0 requests, 0 rows, 0.0 MB in 0 shards"
    assert run_json("inspect", "none")["prompt_tokens"] is None


def test_inspect_shows_one_request(acts):
    said = " ".join(run("inspect", "acts", "--request", "b").split())
    assert "b, completion 0: 2 prompt tokens; in" in said
    assert "resid_post │ 0, 3 │ 10 │ 0–4" in said
    (found,) = run_json("inspect", "acts", "--request", "a")
    assert found["taps"][0] == {"site": "resid_pre", "layer": 0, "positions": [0, 1, 2]}
    assert found["metadata"] == {"line": 1}
    assert "no request 'z'" in run_json("inspect", "acts", "--request", "z", status=2)["error"]


def test_what_is_stored_cannot_make_a_terminal_do_something(acts):
    nasty = "\x1b]0;owned\x07\x9b2J"
    write("nasty", [entry(nasty, tag=nasty, metadata={nasty: nasty})], header(model=nasty))
    shown = run("inspect", "nasty") + run("inspect", "nasty", "--request", nasty)
    assert "owned" in shown
    assert not any(sign in shown for sign in "\x1b\x07\x9b")


def test_inspect_of_a_damaged_store_is_refused_and_names_the_shard(acts):
    path = sorted(acts.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-10])
    assert path.name in run_json("inspect", "acts", status=2)["error"]


def test_inspect_draws_norms_into_a_file(acts):
    pytest.importorskip("matplotlib")
    run("inspect", "acts", "--request", "b", "--plot", "b.svg")
    drawing = Path("b.svg").read_text()
    assert drawing.startswith("<?xml")
    assert "15 rows of request b" in drawing
    assert "plot written: NORMS.PNG" in run("inspect", "acts", "--plot", "NORMS.PNG")
    assert Path("NORMS.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_another_kind_or_of_nothing_is_refused(acts, tmp_path):
    said = run_json("inspect", "acts", "--plot", "norms.gif", status=2)["error"]
    assert ".svg, .pdf, .png or .html, got 'norms.gif'" in said
    (tmp_path / "none").mkdir()
    said = run_json("inspect", "none", "--plot", "norms.svg", status=2)["error"]
    assert "no rows to draw" in said


def test_export_writes_what_is_selected(acts):
    pq = pytest.importorskip("pyarrow.parquet")
    said = run("export", "acts", "out.parquet", "--to", "parquet", "--site", "resid_post",
               "--layer", "3", "--tag", "x", "--position", "0,-1")  # fmt: skip
    assert "4 rows: out.parquet" in said
    rows = pq.read_table("out.parquet").to_pydict()
    assert rows["request"] == ["a", "a", "c", "c"]
    assert rows["position"] == [0, 1, 0, 1]
    assert set(rows["layer"]) == {3}
    found = run_json("export", "acts", "out.arrow", "--to", "arrow", "--token", "1,11")
    assert (found["rows"], found["written"]) == (18, 1)


def test_export_to_npz_is_a_folder_for_each_request(acts):
    found = run_json("export", "acts", "out", "--to", "npz", "--request", "a", "--request", "b",
                     "--child", "0", "--model", "acme/tiny", "--codec", "raw")  # fmt: skip
    assert (found["rows"], found["written"]) == (24, 2)
    assert sorted(path.name for path in Path("out").rglob("*.npz")) == sorted(
        2 * ["resid_post.0.npz", "resid_post.3.npz", "resid_pre.0.npz"]
    )
    again = run_json("export", "acts", "out", "--to", "npz", status=2)
    assert "exists already" in again["error"]


def test_export_for_trainers_tells_what_was_left_out(acts):
    known = run_json("inspect", "acts")
    said = run("export", "acts", "out", "--to", "memmap", "--join", "resid_post.3,resid_pre.0",
               "--exclude", "first")  # fmt: skip
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["taps"] == ["resid_post.3", "resid_pre.0"]
    assert f"{manifest['tokens']:,} rows: out" in said
    assert manifest["tokens"] < known["rows"] / 3, "the first tokens"
    found = run_json("export", "acts", "cut", "--to", "speculators", "--length", "2")
    assert found["cut"] > 0
    assert set(found) == {"status", "out", "rows", "written", "skipped", "cut"}
    error = run_json("export", "acts", "no", "--to", "parquet", "--length", "2", status=2)["error"]
    assert "length: the form parquet has none, got 2" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layer", "7"], "layer: no rows in this store have 7"),
        (["--tag", "y"], "tag: no rows in this store have 'y'"),
        (["--position", "lst"], "lst"),
    ],
)
def test_export_refuses_what_is_not_there(acts, arguments, said):
    error = run_json("export", "acts", "out", "--to", "npz", *arguments, status=2)["error"]
    assert said in error
    assert not Path("out").exists()


def test_verify_says_what_is_wrong_with_which_shard(acts):
    assert "acts: 2 of 2 shards are intact, 3 requests" in run("verify", "acts")
    path = damage(acts)
    said = run("verify", "acts", status=1)
    assert "1 of 2 shards are intact" in said
    assert path.name in said
    found = run_json("verify", "acts", status=1)
    assert [each["shard"] for each in found["findings"]] == [path.name]
    assert found["status"] == 1


def test_merge_puts_stores_into_one(acts):
    write("more", [entry("d")])
    assert "into: 1 new shards; 4 requests in 1 shards" in run(
        "merge", "acts", "more", "--into", "into"
    )
    again = run_json("merge", "acts", "more", "--into", "into")
    assert again == {"status": 0, "new": [], "requests": 4, "shards": 1}
    assert len(open_store("acts").shards) == 2


def test_prune_removes_nothing_unless_it_is_told_to(acts):
    left = acts / ".20200101T000000.000000-0123456789abcdef.safetensors.tmp"
    left.write_bytes(b"half")
    long_ago = time.time() - 7200
    os.utime(left, (long_ago, long_ago))
    before = sorted(os.listdir(acts))
    said = run("prune", "acts", "--tag", "x")
    assert "would be removed, with --yes:" in said
    assert f"1 files of interrupted writes: {left.name}" in said
    assert "2 requests: a, c" in said
    wanted = run_json("prune", "acts", "--tag", "x")
    assert not wanted.pop("done")
    assert sorted(os.listdir(acts)) == before
    done = run_json("prune", "acts", "--tag", "x", "--yes")
    assert done.pop("done")
    assert done == wanted
    assert [each.request for each in open_store("acts").requests] == ["b"]
    assert not left.exists()
    assert "nothing to remove" in run("prune", "acts", "--yes")


def test_prune_removes_doubles_requests_and_what_is_damaged(acts):
    write("acts", [entry("b", seed=9)])
    found = run_json("prune", "acts", "--duplicates", "--yes")
    assert found["requests"] == [["b", 0]]
    assert len(open_store("acts")) == 3
    run("prune", "acts", "--request", "b", "--yes")
    assert "b" not in open_store("acts")
    path = damage(acts)
    said = run_json("prune", "acts", "--damaged")
    assert said["damaged"] == [path.name]
    assert path.exists()
    run("prune", "acts", "--damaged", "--yes")
    assert run_json("verify", "acts")["findings"] == []


def test_prune_refuses_what_is_not_there(acts):
    for arguments in (["--tag", "y"], ["--request", "y"], ["--tag", "y", "--yes"]):
        assert (
            "no rows in this store have 'y'"
            in run_json("prune", "acts", *arguments, status=2)["error"]
        )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(monkeypatch, shell):
    # Otherwise it asks which shell the process was started from, as the command is put together.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    runner = testing.CliRunner()
    result = runner.invoke(app, ["--show-completion", shell], prog_name="midstream")
    assert result.exit_code == 0, result.output
    assert "_MIDSTREAM_COMPLETE" in result.stdout


def test_completion_knows_the_sub_commands_and_their_options(monkeypatch):
    def completed(words: str) -> list[str]:
        monkeypatch.setenv("_MIDSTREAM_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        return CliRunner().invoke(app, [], prog_name="midstream").stdout.split()

    assert completed("midstream store ins") == ["inspect"]
    assert completed("midstream capture --keep") == ["--keep-prompts"]
