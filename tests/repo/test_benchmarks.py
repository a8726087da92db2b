"""Benchmarks: engines take turns, and a run that is cut off leaves what it has measured."""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import engines  # noqa: E402
import identical  # noqa: E402
import overhead  # noqa: E402
import table  # noqa: E402

MACHINE = {
    "device": "fake", "vllm": "0", "torch": "0", "midstream": "0", "commit": "0", "date": "0",
}  # fmt: skip
# A script whose engines are lists; `work` sleeps, and fails in an engine named "fails".
SCRIPT = f"""
import functools, os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import engines

def make(name, folder):
    if name == "broken":
        raise ValueError("no such model")
    open(os.path.join(folder, name), "w").write(str(os.getpid()))
    return name

def work(name, seconds):
    if name == "fails":
        raise ValueError("out of memory")
    time.sleep(seconds)
    return seconds

if __name__ == "__main__":
    engines.machine.describe = lambda: {MACHINE!r}
    parser = engines.arguments("Fakes.")
    parser.add_argument("folder")
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    run = engines.Run("overhead", args, shapes={{"fake": {{"engine": {{"runner": "v1"}}}}}})
    makers = {{name: (make, name, args.folder) for name in args.names}}
    with run.limited(), run.engines(makers, ['plain']) as started:
        for workload, seconds in (("short", 0.01), ("long", 60.0)):
            variants = {{
                name: functools.partial(one.call, work, seconds) for name, one in started.items()
            }}
            run.measure(run.results["shapes"]["fake"], workload, variants)
    sys.exit(run.finish())
"""


def start(folder, *words, script=SCRIPT):
    (folder / "script.py").write_text(script)
    (folder / "pids").mkdir()
    command = [
        sys.executable, str(folder / "script.py"), "--rounds", "3", "--json",
        str(folder / "found.json"),
    ]  # fmt: skip
    return subprocess.Popen(
        [*command, *words[:-1], str(folder / "pids"), *words[-1].split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found(folder):
    return json.loads((folder / "found.json").read_text())


def engines_end(folder):
    """Whether the engines' processes end within some seconds."""
    pids = [int(path.read_text()) for path in (folder / "pids").iterdir()]
    assert pids
    late = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids) and time.monotonic() < late:
        time.sleep(0.05)
    return not any(is_alive(pid) for pid in pids)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_variant_is_compared_with_plain_vllm_in_the_same_round():
    # The host becomes slower in each round, and for the variant's last one very slow.
    slower = {"plain": [1.0, 2.0, 4.0], "idle": [1.1, 2.2, 40.0], "late": [1.0, 2.0]}
    measured = engines.seconds(slower)
    assert measured["idle"]["of_plain"] == pytest.approx(1.1)
    assert measured["late"]["of_plain"] is None
    result = {"benchmark": "overhead", "machine": MACHINE, "rounds": 3}
    engine = {"engine": {"runner": "v2"}}
    rendered = table.render({**result, "shapes": {"8b": {**engine, "decode": measured}}})
    assert "| idle | +10.0 % |" in rendered
    assert "| late | −25.0 % |" in rendered


@pytest.mark.engine
def test_a_run_that_is_killed_leaves_the_workloads_before_and_no_engine(tmp_path):
    process = start(tmp_path, "plain midstream")
    for line in process.stderr:
        if "long: warm-up" in line:
            break
    process.kill()
    process.communicate()
    short = found(tmp_path)["shapes"]["fake"]["short"]
    assert {name: one["rounds"] for name, one in short.items()} == {"plain": 3, "midstream": 3}
    assert "| plain |" in table.render(found(tmp_path))
    assert engines_end(tmp_path)


@pytest.mark.engine
@pytest.mark.nightly
def test_a_run_stops_when_its_seconds_are_over_and_says_what_it_has(tmp_path):
    began = time.monotonic()
    process = start(tmp_path, "--seconds", "5", "plain midstream")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert time.monotonic() - began < 30
    assert "the time is up" in errors
    assert [line for line in errors.splitlines() if line.endswith("plain is ready")]
    assert "as many as fitted into" in out
    assert found(tmp_path)["stopped_after_s"] >= 5
    assert set(found(tmp_path)["shapes"]["fake"]) == {"engine", "short"}
    assert engines_end(tmp_path)


@pytest.mark.engine
def test_what_fails_is_named_and_the_others_are_measured(tmp_path):
    process = start(tmp_path, "--seconds", "5", "plain fails broken")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    result = found(tmp_path)
    assert set(result["failed"]) == {"broken", "short: fails", "long: fails"}
    assert "ValueError: no such model" in result["failed"]["broken"]
    assert "short: fails FAILED" in errors
    assert set(result["shapes"]["fake"]["short"]) == {"plain"}


def make_run(folder, seconds=None):
    args = argparse.Namespace(rounds=5, seconds=seconds, json=folder / "found.json")
    return engines.Run("overhead", args, shapes={})


def test_all_variants_run_in_each_round_in_another_order_and_the_first_is_a_warm_up(tmp_path):
    order = []

    def variant(name):
        order.append(name)
        return float(len(order))

    names = ["plain", "plain again", "idle"]
    run = make_run(tmp_path)
    run.measure(run.results, "work", {name: lambda n=name: variant(n) for name in names})
    rounds = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert len(rounds) == 6
    assert all(Counter(one) == Counter(names) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 2
    assert list(run.results["work"]) == names
    assert min(one["min_s"] for one in run.results["work"].values()) == 4.0
    assert {one["rounds"] for one in found(tmp_path)["work"].values()} == {5}


def test_a_round_that_would_not_end_in_time_does_not_begin(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(engines.time, "monotonic", lambda: clock[0])

    def work():
        clock[0] += 12.0
        return 12.0

    run = make_run(tmp_path, seconds=40)
    with pytest.raises(engines.TimeIsUpError):
        run.measure(run.results, "work", {"plain": work})
    assert 1 <= run.results["work"]["plain"]["rounds"] < 4
    assert clock[0] < run.end


@pytest.mark.parametrize(
    "name",
    ["acting", "against", "capture_cost", "disk", "flat_cost", "guards", "identical",
     "layer_scaling", "lens_cost", "overhead", "sae_cost", "serving", "step_cost", "stream"],
)  # fmt: skip
def test_scripts_that_time_engines_have_a_limit_and_five_rounds(name):
    text = (BENCHMARKS / f"{name}.py").read_text()
    assert "arguments(__doc__" in text
    parser = engines.arguments("Any.")
    assert parser.parse_args([]).rounds == 5
    assert parser.parse_args(["--seconds", "3"]).seconds == 3


def answers(draw):
    return [
        [(draw.randrange(9), [(n, draw.random()) for n in range(5)]) for _ in range(4)]
        for _ in range(3)
    ]


def test_answers_are_identical_only_if_every_logprob_is():
    plain = answers(random.Random(0))
    same = identical.compare(plain, answers(random.Random(0)))
    assert same["identical"]
    assert (same["prompts"], same["tokens"], same["largest_difference"]) == (3, 12, 0.0)
    other = answers(random.Random(0))
    token, likely = other[1][2]
    other[1][2] = token, [(n, value + 2e-7 * (n == 3)) for n, value in likely]
    near = identical.compare(plain, other)
    assert not near["identical"]
    assert (near["other_tokens"], near["other_logprobs"]) == (0, 1)
    assert near["largest_difference"] == pytest.approx(2e-7, rel=1e-3)
    other[0][0] = (-1, other[0][0][1])
    assert identical.compare(plain, other)["other_tokens"] == 1


def test_a_neighbour_that_asks_is_one_sequence_of_the_batch():
    asked = overhead.asked("a neighbour asks", "tiny", 4, True)
    assert [one is None for one in asked["capture"]] == [True, True, True, False]
    (rows,) = asked["capture"][-1]
    assert rows.layers.indices == (2,)


@pytest.mark.parametrize(("count", "distinct"), [(1, 1), (16, 4)])
def test_k_distinct_vectors_are_spread_over_the_batch(count, distinct):
    steers = overhead.asked(f"{overhead.EVERY}{count}", "tiny", 4, True)["steer"]
    assert [len(one) for one in steers] == [4] * 4
    vectors = {bytes(memoryview(one[2].vector.numpy())) for one in steers}
    assert len(vectors) == distinct
