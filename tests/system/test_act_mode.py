"""`vllm.LLM(worker_cls="midstream.worker.CaptureWorker")`: every request's rows, in files."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import engine, greedy, tokens
from support.own_process import python
from support.pool import Pool
from system.act_mode import MAX_TOKENS, PROMPTS, WORKER

from midstream import Capture
from midstream.codecs import Rp8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("act")


@pytest.fixture(scope="module")
def found(tiny_llama: Path, folder: Path) -> dict[str, Any]:
    python("-m", "system.act_mode", tiny_llama, folder, timeout=580, has_midstream=False)
    loaded: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def expected(pool: Pool) -> list[Any]:
    with contextmanager(pool.use)("uncached") as llm:
        params = greedy(MAX_TOKENS, detokenize=False)
        prompts = [tokens(prompt) for prompt in PROMPTS]
        outputs: list[Any] = llm.generate(prompts, params, capture=Capture("all"), use_tqdm=False)
    return outputs


def test_nothing_of_midstream_was_imported_by_the_program(found):
    assert not found["rp8"]["imported"]
    assert found["rp8"]["enabled"]
    assert found["rp8"]["worker"].endswith("CPUWorker")


@pytest.mark.parametrize(("mode", "codec"), [("rp8", "rp8:k=32,seed=0"), ("full8", "full8")])
def test_every_request_has_a_file_for_each_layer_and_a_manifest(
    found, expected, folder, mode, codec
):
    for manifest, output, prompt in zip(found[mode]["manifests"], expected, PROMPTS, strict=True):
        own = folder / mode / manifest["name"]
        assert sorted(path.name for path in own.iterdir()) == [
            "manifest.json", "resid_post.0.npz", "resid_post.1.npz", "resid_post.2.npz",
        ]  # fmt: skip
        assert manifest["codec"] == codec
        assert manifest["return"] == ("gathered" if mode == "full8" else "sharded")
        assert [one["ranks"] for one in manifest["files"]] == [[0], [0], [0]]
        assert manifest["prompt_tokens"] == len(prompt)
        assert manifest["generated_tokens"] == MAX_TOKENS
        length = len(prompt) + MAX_TOKENS - 1
        for layer, one in enumerate(manifest["files"]):
            assert (one["layer"], one["rows"]) == (layer, length)
            with np.load(one["path"]) as file:
                assert {name: list(file[name].shape) for name in file} == {
                    name: each["shape"] for name, each in one["arrays"].items()
                }
                assert file["positions"].tolist() == list(range(length))
                assert file["token_ids"].tolist() == output.activations.token_ids.tolist()
        written = json.loads((own / "manifest.json").read_text())
        assert written["request_id"] == found[mode]["ids"][PROMPTS.index(prompt)]


def test_the_manifest_is_in_the_metrics_extras_where_there_are_metrics(found):
    assert found["full8"]["extras"] == found["full8"]["manifests"]
    assert found["rp8"]["extras"] == [None] * len(PROMPTS), "no statistics, no metrics"


def test_what_is_computed_is_what_it_is_without(found, expected):
    plain = [list(output.outputs[0].token_ids) for output in expected]
    assert all(found[mode]["generated"] == plain for mode in ("rp8", "full8", "off"))


def values_of(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale of each row) of a file with steps of uint8."""
    with np.load(path) as file:
        values = file["zero"][:, None] + file["scale"][:, None] * file["q"].astype(np.float32)
        return torch.from_numpy(values), torch.from_numpy(file["scale"])


def test_the_files_have_the_rows(found, expected):
    for nth, output in enumerate(expected):
        for layer in range(3):
            rows = output.activations["resid_post", layer]
            for mode, exact in (("full8", rows), ("rp8", Rp8(32).sketch(rows))):
                manifest = found[mode]["manifests"][nth]["files"][layer]
                values, scale = values_of(manifest["path"])
                # Half a step, and what two engines differ by.
                assert ((values - exact).abs() <= scale[:, None] * 0.51 + 1e-3).all()
                assert manifest["scales"]["max"] == pytest.approx(float(scale.max()))


def test_switched_off_it_is_plain_vllm(found, folder):
    off = found["off"]
    assert off["manifests"] == [None] * len(PROMPTS)
    assert not off["enabled"]
    assert not (folder / "off").exists()


def test_a_wrong_variable_keeps_the_engine_from_starting(found):
    assert found["refused"].startswith("VLLM_ACT_MODE: expected one of `rp8`")


def test_with_settings_of_midstreams_own_there_is_one_place_too_many(tiny_llama, monkeypatch):
    monkeypatch.setenv("VLLM_ACT_CAPTURE", "1")
    with (
        pytest.raises(
            ValueError, match="settings in both `midstream` and the environment variables VLLM_ACT_"
        ),
        engine(tiny_llama, midstream={}, worker_cls=WORKER),
    ):
        pass
