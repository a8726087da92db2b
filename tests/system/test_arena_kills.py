"""An engine in a process of its own: too little shared memory, and whose end leaves none behind."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support import own_process
from support.own_process import python
from support.shared_memory import mapped

WAITED = """
import sys
from pathlib import Path
from midstream import Capture
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, greedy, tokens

PROMPTS = [list(range(3 + n % 40, 40 + n)) for n in range(48)]

def run(llm, prompts):
    return llm.generate([tokens(one) for one in prompts], greedy(3, detokenize=False),
        capture=Capture(layers="all", sites=ALL_SITES), use_tqdm=False)

if __name__ == "__main__":
    more = {"sites": ALL_SITES, "overflow": "block", "arena_bytes": 1 << 20}
    with engine(Path(sys.argv[1]), max_num_batched_tokens=64, max_num_seqs=8, block_size=32,
            midstream=more) as llm:
        view, waited, step = inspect(llm), [], llm.llm_engine.step
        llm.llm_engine.step = lambda: (waited.append(view.waiting()), step())[1]
        found = run(llm, PROMPTS)
        assert max(waited) > 2, "nobody had to wait"
        for n in (0, 17, 47):
            [alone] = run(llm, [PROMPTS[n]])
            for tap, rows in alone.activations.items():
                assert (found[n].activations[tap] - rows).abs().max() < 1e-4
        for one, prompt in zip(found, PROMPTS, strict=True):
            assert one.receipt.status == "ok"
            assert one.activations.positions.tolist() == list(range(len(prompt) + 2))
            assert one.activations.token_ids[: len(prompt)].tolist() == prompt
        print("DONE")
"""
# Holds 30 MiB of rows; then ends itself, or its worker and then reads them.
HOLDING = """
import os, signal, sys, time
from pathlib import Path
from midstream import Capture
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, greedy, tokens

if __name__ == "__main__":
    settings = {"sites": ALL_SITES, "arena_bytes": 1 << 30}
    with engine(Path(sys.argv[1]), max_model_len=512, max_num_batched_tokens=4096, block_size=32,
            midstream=settings) as llm:
        everything = Capture(layers="all", sites=ALL_SITES)
        held = llm.generate([tokens([9 + n % 90] * 500) for n in range(30)],
            greedy(1, detokenize=False), use_tqdm=False, capture=everything)
        rows = [output.activations["resid_post", 1] for output in held]
        view = inspect(llm)
        [pid] = view.worker_ids()
        print("READY", pid, view.arena_used()["leases"], flush=True)
        if sys.argv[2] == "front end":
            time.sleep(600)
        os.kill(pid, signal.SIGKILL)
        before = [row.sum().item() for row in rows]
        time.sleep(1)
        assert [row.sum().item() for row in rows] == before, "rows went with the worker"
        print("HELD", flush=True)
        os._exit(0)
"""


@contextmanager
def script(folder: Path, text: str) -> Iterator[Path]:
    path = folder / "program.py"
    path.write_text(text)
    yield path


def test_requests_wait_for_room_in_an_engine_process_of_its_own(tiny_llama, tmp_path):
    with script(tmp_path, WAITED) as program:
        done = python(program, tiny_llama, timeout=200, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert "DONE" in done


@pytest.mark.parametrize("victim", ["engine", "front end"])
def test_after_a_kill_nothing_is_left_in_shared_memory(tiny_llama, tmp_path, victim):
    with script(tmp_path, HOLDING) as program:
        process = own_process.start(
            program, tiny_llama, victim, stdout=subprocess.PIPE, text=True,
            env=own_process.environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
        )  # fmt: skip
    with process:
        said = iter(process.stdout.readline, "")
        [_, pid, leases] = next(line for line in said if line.startswith("READY")).split()
        assert int(leases) > 0, "no rows are held"
        memory = mapped([process.pid, int(pid)])
        assert memory, "the rows are not in shared memory"
        if victim == "front end":
            os.kill(process.pid, signal.SIGKILL)
        else:
            assert "HELD\n" in said
    end = time.monotonic() + 60
    while psutil.pid_exists(int(pid)) or memory & mapped():
        assert time.monotonic() < end, f"shared memory is left: {memory & mapped()}"
        time.sleep(0.1)
    assert not [name for name in os.listdir("/dev/shm") if "midstream" in name]
