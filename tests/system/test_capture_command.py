"""A data set through a real engine has the rows of the same prompts in memory."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import engines, own_process
from support.forging import forged
from support.nightly import NIGHTLY, rounds

from midstream import Capture, Role, SamplingParams, Text, open_store
from midstream.lab.export import export
from midstream.lab.jobs import Job, PromptParts, Summary, capture_dataset
from midstream.lab.jobs.engine import VllmEngine
from midstream.lab.jobs.estimate import estimate_job
from midstream.plan import Positions
from midstream.store import verify

LINES = 300
TOO_LONG = "x" * 300
CAPTURE = {"layers": [0, 2], "sites": ["resid_post", "mlp_out"]}
SITES = ["resid_pre", "mlp_out", "resid_post"]


def make_texts(count: int) -> list[str]:
    """Prompts of 3 to 80 tokens, some of which begin alike."""
    chance = random.Random(5)
    words = ["the cat", " sat", " on", " a mat", ", and", " 😀", " then", " nothing"]
    return ["".join(chance.choices(words, k=chance.randint(1, 11))) for _ in range(count)]


TEXTS = make_texts(LINES)


@pytest.fixture(scope="module")
def llm(talking_llama: Path) -> Iterator[Any]:
    """An engine in this process, for what is compared and for the jobs that need no command."""
    settings = {"sites": SITES, "on_mismatch": "warn"}
    with engines.engine(talking_llama, midstream=settings, max_num_seqs=16) as found:
        yield found


def write_lines(folder: Path, lines: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(llm: Any, folder: Path, lines: list[Any], **fields: Any) -> Summary:
    known: dict[str, Any] = {
        "model": "tiny",
        "data": str(write_lines(folder, lines)),
        "out": str(folder / "acts"),
        "capture": Capture(**CAPTURE, positions="last_prompt"),
    }
    return capture_dataset(Job(**(known | fields)), lambda job: VllmEngine(llm, job))


def stored(folder: Path) -> dict[int, Any]:
    """The completion that is stored of each line; each line is there once, and all is right."""
    found = verify(folder / "acts")
    assert found.ok, str(found)
    requests = open_store(folder / "acts").requests
    by_line = {each.metadata["line"]: each for each in requests}
    assert len(by_line) == len(requests)
    return by_line


def assert_same(one: Any, output: Any, codec: str = "raw") -> None:
    found, wanted = one.activations(), output.activations
    assert set(found) == set(wanted)
    assert one.prompt_tokens == len(output.prompt_token_ids)
    for tap in wanted:
        assert torch.equal(found.positions_of(*tap), wanted.positions_of(*tap))
        assert torch.equal(found.token_ids_of(*tap), wanted.token_ids_of(*tap))
        # A reduced value may be rounded to the step beside.
        close = {"rtol": 1e-5, "atol": 1e-5} if codec == "raw" else {"rtol": 0.02, "atol": 0.05}
        torch.testing.assert_close(found[tap], wanted[tap], **close)


def test_a_draft_model_trains_on_what_the_model_read_and_said(
    llm: Any, talking_llama: Path, tmp_path: Path
) -> None:
    """Speculators pairs a token with the vectors of the one before it, and takes the model's next
    token from the last vector of each.
    """
    chats = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS[:6]]
    capture = Capture("all", positions="all")
    fields = {"model": str(talking_llama), "chat": True, "roles": True, "max_tokens": 8}
    run(llm, tmp_path, chats, capture=capture, **fields)
    store = open_store(tmp_path / "acts")
    export(store, tmp_path / "rows", "speculators")
    model = transformers.AutoModelForCausalLM.from_pretrained(talking_llama)
    begins = [request.prompt_tokens for request in store.requests]
    samples = datasets.load_from_disk(str(tmp_path / "rows"))
    assert len(samples) == len(begins) == 6
    for number, (sample, begin) in enumerate(zip(samples, begins, strict=True)):
        file = load_file(tmp_path / "rows" / "hidden_states" / f"hs_{number}.safetensors")
        ids, rows = sample["input_ids"], file["hidden_states"]
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states
            last = model.model.norm(rows[:, -1])
            said = model.lm_head(last).argmax(-1)
        wanted = torch.stack(states[1:], 2)[0]
        found = torch.stack([*rows[:, :-1].unbind(1), last], 1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert said[begin - 1 : -1].tolist() == ids[begin:].tolist()
        assert sample["loss_mask"].tolist() == [0] * begin + [1] * (len(ids) - begin)


def generate(llm: Any, prompts: list[str], max_tokens: int, **capture: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return llm.generate(prompts, params, capture=Capture(**capture), use_tqdm=False)


@pytest.mark.parametrize(
    "codec",
    [
        "raw",
        "full8",
        pytest.param("rp8:k=16,seed=3", marks=pytest.mark.nightly),
        pytest.param("topk8:k=8", marks=pytest.mark.nightly),
    ],
)
def test_rows_are_those_of_the_same_prompts_in_memory(llm, tmp_path, codec):
    texts = TEXTS[:40]
    what = {**CAPTURE, "positions": "all", "codec": codec}
    summary = run(llm, tmp_path, texts, capture=Capture(**what), max_tokens=4)
    assert (summary.status, summary.counts.stored) == (0, 40)
    outputs = generate(llm, texts, 4, **what)
    found = stored(tmp_path)
    for line, output in enumerate(outputs, 1):
        assert_same(found[line], output, codec)
    assert summary.counts.rows == sum(
        len(output.activations.positions_of(*tap))
        for output in outputs
        for tap in output.activations
    )
    assert open_store(tmp_path / "acts").codecs == (codec,)


def test_lines_that_the_engine_refuses_are_named_and_the_others_captured(llm, tmp_path):
    lines = [{"text": "fine"}, {"text": TOO_LONG}, {"text": ""}, {"text": "the cat"}, {"text": "a"}]
    what = Capture(**CAPTURE, positions=Text("cat"))
    summary = run(llm, tmp_path, lines, capture=what)
    assert summary.status == 1
    reasons = {
        each["line"]: each["reason"]
        for each in map(json.loads, (tmp_path / "acts/errors.jsonl").read_text().splitlines())
    }
    assert set(reasons) == {1, 2, 3, 5}
    assert "maximum" in reasons[2]
    assert "empty" in reasons[3]
    assert "cat" in reasons[5]
    found = stored(tmp_path)
    assert set(found) == {4}
    (output,) = generate(llm, ["the cat"], 1, **CAPTURE, positions=Text("cat"))
    assert_same(found[4], output)


def test_conversations_are_written_out_by_the_models_template(llm, talking_llama, tmp_path):
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "no"},
         {"role": "user", "content": "why?"}]
        for text in TEXTS[:12]
    ]  # fmt: skip
    lines = [*({"messages": talk} for talk in talks), "alone", {"messages": [{"role": 3}]}]
    where = Positions([Role("user", message=-1), "last_prompt"])
    what = Capture(**CAPTURE, positions=where)
    summary = run(llm, tmp_path, lines, capture=what, chat=True, keep_prompts=True)
    assert (summary.counts.stored, summary.counts.failed) == (13, 1)
    files = {"data": str(tmp_path / "prompts.jsonl"), "out": str(tmp_path / "acts")}
    model = {"model": str(talking_llama), "dtype": "float32"}
    guess = estimate_job(Job(**model, **files, capture=what, chat=True))
    counts = summary.counts
    assert (guess.rows, guess.nbytes, guess.failed) == (counts.rows, counts.nbytes, 1)
    written = sum(path.stat().st_size for path in (tmp_path / "acts").glob("*.safetensors"))
    # The index has the ids of requests, which are longer the more an engine had before.
    assert written == pytest.approx(guess.stored_bytes, rel=0.1)
    assert guess.nbytes < written < guess.free_bytes
    talks.append([{"role": "user", "content": "alone"}])
    outputs = llm.chat(
        talks, SamplingParams(temperature=0, max_tokens=1), capture=what, use_tqdm=False
    )
    found = stored(tmp_path)
    for line, output in enumerate(outputs, 1):
        assert_same(found[line], output)
    own = found[1].metadata["midstream"]
    assert own["prompt"].startswith("<|im_start|>user\n" + TEXTS[0])
    assert own["receipt"]["status"] == "ok"


def test_packed_conversations_have_the_rows_of_their_tokens_and_masks(llm, talking_llama, tmp_path):
    """The mask is what transformers says of the same template with `generation` marks."""
    # Of a character of several tokens that ends a message, transformers marks the first alone.
    texts = [text.replace("😀", "ä.") for text in TEXTS[:12]]
    talks = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in zip(texts[::2], texts[1::2], strict=True)
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(talking_llama)
    marked = tokenizer.chat_template.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    ids: list[int] = []
    mask: list[int] = []
    origins: list[tuple[int, int]] = []
    for line, talk in enumerate(talks, 1):
        encoded = tokenizer.apply_chat_template(
            talk, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        separator = [tokenizer.eos_token_id] * bool(ids)
        ids += separator + encoded["input_ids"]
        mask += [0] * len(separator) + encoded["assistant_masks"]
        origins += [(-1, -1)] * len(separator)
        origins += [(line, offset) for offset in range(len(encoded["input_ids"]))]
    fields = {"chat": True, "roles": True, "pack": 100, "exclude": "first"}
    what = Capture(**CAPTURE, positions="prompt")
    lines = [{"messages": talk} for talk in talks]
    model = {"model": str(talking_llama), "dtype": "float32"}
    summary = run(llm, tmp_path, lines, capture=what, **fields, **model)
    assert summary.status == 0
    files = {"data": str(tmp_path / "prompts.jsonl"), "out": str(tmp_path / "acts")}
    guess = estimate_job(Job(**model, **files, capture=what, **fields))
    assert (guess.rows, guess.prompts) == (summary.counts.rows, summary.counts.stored)
    found = stored(tmp_path)
    prompts = [ids[at : at + 100] for at in range(0, len(ids), 100)]
    assert set(found) == set(range(1, len(prompts) + 1))
    outputs = generate(llm, [{"prompt_token_ids": prompt} for prompt in prompts], 1, **CAPTURE)
    for number, output in enumerate(outputs, 1):
        start, request = 100 * (number - 1), found[number]
        wanted = [
            place for place in range(len(output.prompt_token_ids))
            if place and origins[start + place][1] > 0
        ]  # fmt: skip
        activations, parts = request.activations(), PromptParts.read(request.metadata)
        assert activations.positions.tolist() == wanted
        for tap in output.activations:
            torch.testing.assert_close(
                activations[tap], output.activations[tap][wanted], rtol=1e-5, atol=1e-5
            )
        assert list(zip(*map(list, parts.origin(wanted)), strict=True)) == [
            origins[start + place] for place in wanted
        ]
        assert parts.loss_mask(wanted).tolist() == [bool(mask[start + place]) for place in wanted]


def test_a_request_that_fails_on_a_worker_fails_its_line_alone(llm, tmp_path):
    """Its plan arrives there as junk."""
    with forged(5):
        summary = run(llm, tmp_path, TEXTS[:12])
    assert (summary.counts.stored, summary.counts.failed) == (11, 1)
    (line,) = set(range(1, 13)) - set(stored(tmp_path))
    assert line == 5
    again = run(llm, tmp_path, TEXTS[:12], resume=True)
    assert (again.status, again.counts.skipped, again.counts.stored) == (0, 11, 1)


def command(
    folder: Path, model: Path, *arguments: str, separate: bool = True
) -> own_process.Process:
    environment = own_process.environment(VLLM_ENABLE_V1_MULTIPROCESSING=str(int(separate)))
    settings = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16}
    return own_process.start(
        *("-m", "midstream", "capture", str(model),
         "--data", "prompts.jsonl", "--out", "acts", "--resume",
         "--layers", ",".join(map(str, CAPTURE["layers"])), "--sites", ",".join(CAPTURE["sites"]),
         "--positions", "all", "--max-tokens", "3", "--tag", "pile", "--dtype", "float32",
         "--engine-args", json.dumps(settings), "--flush-seconds", "0.1", *arguments),
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def shards(folder: Path) -> int:
    return len(list((folder / "acts").glob("*.safetensors")))


def wait_for_another_shard(folder: Path, process: own_process.Process) -> None:
    before = shards(folder)
    for _ in range(15000):
        if shards(folder) > before:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("nothing was written")


def engine_process(process: own_process.Process) -> psutil.Process:
    children = psutil.Process(process.pid).children()
    return max(children, key=lambda child: child.memory_info().rss)


def test_nothing_is_lost_and_nothing_there_twice_whichever_process_is_killed(
    llm, talking_llama, tmp_path
):
    write_lines(tmp_path, [*TEXTS, TOO_LONG])
    chance = random.Random(3)
    for _ in range(rounds(suite=1, nightly=8)):
        process = command(tmp_path, talking_llama, separate=NIGHTLY)
        wait_for_another_shard(tmp_path, process)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        before = set(stored(tmp_path))
        assert 0 < len(before) < LINES

    process = command(tmp_path, talking_llama, "--json")
    wait_for_another_shard(tmp_path, process)
    # While the command is stopped it takes no results, so that the job does not end before.
    os.kill(process.pid, signal.SIGSTOP)
    engine_process(process).kill()
    os.kill(process.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    summary = json.loads(out)
    assert "EngineDeadError" in summary["error"]
    assert summary["interrupted"]
    found = set(stored(tmp_path))
    assert summary["skipped"] == len(before)
    assert found > before
    assert summary["stored"] == summary["captured"] == len(found) - len(before)

    process = command(tmp_path, talking_llama, "--json", separate=NIGHTLY)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    summary = json.loads(out)
    assert (summary["failed"], summary["total"]) == (1, LINES + 1)
    assert summary["skipped"] == len(found)
    assert summary["skipped"] + summary["stored"] == LINES
    assert f"line {LINES + 1}: " in err
    every = stored(tmp_path)
    assert set(every) == set(range(1, LINES + 1))
    outputs = generate(llm, TEXTS, 3, **CAPTURE, positions="all")
    for line, output in enumerate(outputs, 1):
        assert_same(every[line], output)
    assert {each.tag for each in every.values()} == {"pile"}
