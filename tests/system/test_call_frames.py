"""How often the processes of an engine make room for the frames of calls."""

import json
import threading

from support.engines import finish, greedy, tokens
from support.own_process import python

from midstream import Capture, call_frames

SCRIPT = """
import os, sys, threading
from pathlib import Path
from support.engines import engine, greedy, tokens
from midstream import Capture, call_frames

class Counted(threading.local):
    "Writes a line for each time that room is made; each process of the engine imports this."

    def __setattr__(self, name, value):
        if value:
            with open(Path(sys.argv[2]) / str(os.getpid()), "a") as file:
                file.write("made\\n")
        super().__setattr__(name, value)

call_frames._ROOM = Counted()

if __name__ == "__main__":
    with engine(Path(sys.argv[1]), tensor_parallel_size=2) as llm:
        for _ in range(3):
            llm.generate(tokens([3, 4, 5]), greedy(6, detokenize=False), use_tqdm=False,
                capture=Capture(layers="all"))
        print(os.getpid())
"""


def test_an_offline_call_makes_room_once_and_so_does_each_step_that_a_caller_runs(llm, monkeypatch):
    made: list[str] = []

    class Counted(threading.local):
        def __setattr__(self, name: str, value: bool) -> None:
            made.extend([name] if value else [])
            super().__setattr__(name, value)

    monkeypatch.setattr(call_frames, "_ROOM", Counted())
    params = greedy(6, detokenize=False)
    llm.generate(tokens([3, 4, 5]), params, use_tqdm=False, capture=Capture(layers="all"))
    assert len(made) == 1
    llm.llm_engine.add_request("by steps", tokens([3, 4, 5]), params)
    finish(llm)
    assert len(made) == 1 + 6


def test_the_engine_core_and_each_worker_make_room_once_and_not_for_each_step(tiny_llama, tmp_path):
    script, made = tmp_path / "program.py", tmp_path / "made"
    script.write_text(SCRIPT)
    made.mkdir()
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    own = json.loads(python(script, tiny_llama, made, timeout=540, **environment).splitlines()[-1])
    counts = {int(each.name): len(each.read_text().splitlines()) for each in made.iterdir()}
    assert counts.pop(own) == 3
    assert list(counts.values()) == [1, 1, 1]
