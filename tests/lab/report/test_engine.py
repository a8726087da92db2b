"""The whole command on SmolLM2, against transformers."""

import base64
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import own_process

from midstream.lab.demo import prompts
from midstream.lab.fit import Directions
from midstream.lab.report.page import DATA_ID

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.nightly]

SRC = Path(__file__).resolve().parents[3] / "src"
SCALES = (-1.0, 1.0)
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def page(smollm2, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "report.html"
    options = ["--model", smollm2, "--out", out, "--max-tokens", str(MAX_TOKENS)]
    options += ["--scales", *map(str, SCALES)]
    shown = own_process.python("-m", "midstream.lab.demo", *options, timeout=540)
    assert "Mean reading by strength" in " ".join(shown.split())
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(page):
    found = re.search(rf'id="{DATA_ID}">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


class Reference:
    """The same model in transformers, with plain hooks."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = self.model.model.layers

    @torch.no_grad()
    def streams(self, token_ids):
        """`[layers, tokens, hidden]`, after each layer; the last one before the final norm."""
        rows = []
        hooks = [
            layer.register_forward_hook(lambda _m, _a, out: rows.append(self._stream(out)[0]))
            for layer in self.layers
        ]
        self.model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return torch.stack(rows)

    @torch.no_grad()
    def answer(self, question, vector, layer):
        turns = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

        def push(_module, _arguments, out):
            moved = self._stream(out) + vector
            return (moved, *out[1:]) if isinstance(out, tuple) else moved

        hook = self.layers[layer].register_forward_hook(push)
        out = self.model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        hook.remove()
        answer = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return str(answer).strip()

    @staticmethod
    def _stream(out):
        return out[0] if isinstance(out, tuple) else out


@pytest.fixture(scope="module")
def reference(smollm2):
    return Reference(smollm2)


# Of all sentences in transformers, which takes long. By day `engine/test_fit.py` has a fit against
# one on transformers' rows.
@pytest.fixture(scope="module")
def fitted(reference):
    last = [
        torch.stack([reference.streams(reference.tokenizer(t).input_ids)[:, -1] for t in texts])
        for texts in zip(*prompts.PAIRS, strict=True)
    ]
    return Directions.from_rows(*last, folds=6, seed=0)


def test_separability_equals_a_recomputation_from_transformers(data, fitted):
    assert len(data["scores"]) == 30
    assert data["best_layer"] == fitted.best_layer == data["layer"]
    for shown, expected in zip(data["scores"], fitted.scores.values(), strict=True):
        # One pair of sentences that changes places is worth 1/576.
        assert shown["auc"] == pytest.approx(expected.auc, abs=2 / 576)
        assert shown["accuracy"] == pytest.approx(expected.accuracy, abs=1.01 / 48)
        assert shown["d_prime"] == pytest.approx(expected.d_prime, abs=0.01)
    assert data["gap_norm"] == pytest.approx(fitted[data["layer"]].gap, rel=1e-3)


def test_heatmaps_equal_a_recomputation_from_transformers(data, reference, fitted):
    for shown, text in zip(data["token_maps"], prompts.PAIRS[prompts.SHOWN_PAIR], strict=False):
        token_ids = reference.tokenizer(text).input_ids
        rows = reference.streams(token_ids)
        assert shown["tokens"] == [reference.tokenizer.decode([token]) for token in token_ids]
        expected = torch.from_numpy(fitted.cosine(rows))
        torch.testing.assert_close(torch.tensor(shown["cosine"]), expected, atol=2e-3, rtol=0)
        places = torch.tensor(shown["projection"])
        torch.testing.assert_close(
            places, torch.from_numpy(fitted.project(rows)), atol=0.02, rtol=0.01
        )


def test_answers_equal_transformers_steered_by_hooks(data, reference, fitted):
    layer = data["layer"]
    for question in data["questions"][:3]:
        for answer in question["answers"]:
            vector = answer["scale"] * torch.from_numpy(fitted.vectors[layer])
            assert answer["text"] == reference.answer(question["prompt"], vector, layer)


def test_readings_equal_a_recomputation_and_rise_with_strength(data, reference, fitted):
    layer = data["layer"]
    for answer in data["questions"][0]["answers"]:
        rows = reference.streams(reference.tokenizer(answer["text"]).input_ids)
        expected = float(fitted.project(rows)[layer, 1:].mean())
        assert answer["reading"] == pytest.approx(expected, abs=0.02)
    columns = zip(*(question["answers"] for question in data["questions"]), strict=True)
    means = [sum(answer["reading"] for answer in column) / len(column) for column in columns]
    assert means[0] < means[-1]


def test_the_code_of_the_page_gives_the_answer_that_the_page_shows(page, data, tmp_path):
    link = re.search(
        r'download="([^"]+)" href="data:application/octet-stream;base64,([^"]+)"', page
    )
    code = re.search(r"<code>(from midstream.*?)</code>", page, re.DOTALL)
    assert link
    assert code
    (tmp_path / link[1]).write_bytes(base64.b64decode(link[2]))
    program = "\n".join(f"    {line}" for line in html.unescape(code[1]).splitlines())
    (tmp_path / "again.py").write_text(f'if __name__ == "__main__":\n{program}\n')
    paths = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    limits = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "again.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **limits},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [a["text"] for a in data["questions"][0]["answers"] if a["scale"] == max(SCALES)]
    assert shown[0] in done.stdout
