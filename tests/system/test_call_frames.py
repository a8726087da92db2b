"""How often the processes of an engine make room for the frames of calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.own_process import python

SCRIPT = """
import json, os, sys, threading, torch
from pathlib import Path
from support.engines import engine, finish, generated, greedy, tokens
from midstream import Capture, call_frames

class Counted(threading.local):
    "Writes a line for each time that room is made; each process of the engine imports this."

    def __setattr__(self, name, value):
        if value:
            with open(Path(sys.argv[3]) / str(os.getpid()), "a") as file:
                file.write("made\\n")
        super().__setattr__(name, value)

call_frames._ROOM = Counted()

if __name__ == "__main__":
    model, args, folder = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    with engine(model, **args) as llm:
        here = folder / str(os.getpid())
        found = [
            llm.generate(tokens([3, 4, 5]), greedy(6, detokenize=False), use_tqdm=False,
                capture=Capture(layers="all"))[0]
            for _ in range(3)
        ]
        calls = len(here.read_text().splitlines())
        llm.llm_engine.add_request("by steps", tokens([3, 4, 5]), greedy(6, detokenize=False))
        stepped = finish(llm)
        made = {each.name: len(each.read_text().splitlines()) for each in folder.iterdir()}
    steps = made.pop(str(os.getpid())) - calls
    torch.save({
        "calls": calls,
        "steps": steps,
        "others": sorted(made.values()),
        "tokens": [generated(one) for one in (*found, *stepped.values())],
        "rows": [one.activations["resid_post", 2] for one in found],
    }, sys.argv[4])
"""


def run(model: Path, folder: Path, own_process: bool, **args: object) -> dict[str, object]:
    import torch

    made = folder / f"made-{own_process}"
    made.mkdir()
    script, out = folder / f"{made.name}.py", folder / f"{made.name}.pt"
    script.write_text(SCRIPT)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process))}
    python(script, model, json.dumps(args), made, out, timeout=540, **environment)
    return torch.load(out)


@pytest.fixture(scope="module")
def in_process(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run(tiny_llama, tmp_path_factory.mktemp("room"), own_process=False)


def test_an_offline_call_makes_room_once_and_so_does_each_step_that_a_caller_runs(in_process):
    assert in_process["calls"] == 3
    assert in_process["steps"] == 6
    assert in_process["others"] == []


def test_the_engine_core_and_each_worker_make_room_once_and_not_for_each_step(
    tiny_llama: Path, tmp_path: Path, in_process: dict[str, object]
):
    import torch

    found = run(tiny_llama, tmp_path, own_process=True, tensor_parallel_size=2)
    assert found["others"] == [1, 1, 1]
    assert found["calls"] == 3
    assert found["tokens"] == in_process["tokens"]
    for mine, theirs in zip(found["rows"], in_process["rows"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
