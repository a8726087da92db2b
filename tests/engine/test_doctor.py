"""The doctor on engines: right models are ok, and what is broken is found, where it is broken."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf
from support import vision
from support.engines import closing

from midstream.lab.tools.doctor import drawn_images
from midstream.lab.tools.doctor.cases import OF_PARTS, OPERATIONS, WITH_IMAGE
from midstream.lab.tools.doctor.drawn_images import DRAWN, LENGTH, PROCESSED, STD
from midstream.lab.tools.doctor.examine import Options, examine, examine_config
from midstream.lab.tools.doctor.own_modules import OwnModules
from midstream.lab.tools.doctor.report import LACKING, OK, REFUSED, WRONG
from midstream.runtime.models import inner_sites
from midstream.runtime.models import registry as conventions
from midstream.runtime.models.convention import Refusal, dead
from midstream.runtime.worker.taps import sum_check, taps
from midstream.sites import IN_LAYERS, INNER, OUTER

LLAMA = ("model_executor.models.llama", "LlamaDecoderLayer")
NORM = "post_attention_layernorm"


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """As the command has it: the engines are eager, and vLLM's sampler need not be compiled."""
    with closing(), torch._dynamo.config.patch(disable=True):
        yield


ENDS = (("embed", 0), ("final_norm", 2))


@pytest.fixture
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts without the check of sums, which refuses what the doctor is to find."""
    monkeypatch.setattr(sum_check, "claimed_sums", lambda *_: [])


def test_a_right_model_is_ok_at_every_site_of_every_layer_and_in_every_operation(tiny_llama):
    report = examine(Options(str(tiny_llama), size=None))
    assert (report.outcome, report.reason, report.status) == (OK, "", 0)
    assert {(one.site, one.layer) for one in report.sites} == {
        *((site, layer) for site in IN_LAYERS for layer in range(3)),
        *ENDS,
    }
    assert {one.site for one in report.sites if one.outcome != OK} == {"router"}
    assert {one.name for one in report.operations} == {*OPERATIONS, *OF_PARTS}
    steered = {(one.site, one.layer) for one in report.operations if one.name == "Steer"}
    assert steered == {
        *((site, layer) for site in IN_LAYERS if site != "router" for layer in range(3)),
        *ENDS,
    }
    parts = {(one.name, one.site) for one in report.operations if one.name in OF_PARTS}
    assert {site for name, site in parts if "head" in name} == {*"qkvz", "rot_q", "rot_k"}
    assert {site for name, site in parts if "components" in name} == {*INNER} - {"router"}
    assert report.worst is not None
    assert 0 < report.worst < 1e-4
    assert report.architecture == "LlamaForCausalLM"
    assert report.layer_classes == ("model_executor.models.llama.LlamaDecoderLayer",)


def test_a_right_model_is_ok_in_bfloat16_too(tiny_llama):
    """transformers in float32 is too far away: vLLM's own modules tell, and to the bit."""
    report = examine(Options(str(tiny_llama), size=None, dtype="bfloat16"))
    assert (report.outcome, report.status) == (OK, 0), report.reason
    assert report.compared_with.startswith("vLLM's own modules")
    assert report.to_dict()["compared_with"] == report.compared_with
    assert "too far from bfloat16" in report.reason
    outer = [one for one in report.sites if one.site in (*OUTER, "embed", "final_norm")]
    assert {(one.outcome, one.error) for one in outer} == {(OK, 0.0)}
    assert {one.name for one in report.operations} >= {*OPERATIONS}
    assert {one.outcome for one in report.operations if one.site in OUTER} == {OK}


@pytest.mark.nightly
def test_a_small_qwen3_is_ok_in_bfloat16():
    report = examine_config(Options("Qwen3", dtype="bfloat16"), hf.Qwen3Config())
    assert (report.outcome, report.status) == (OK, 0), report.reason


def test_a_model_that_transformers_lacks_is_compared_with_vllms_own_modules(tmp_path):
    """Of a configuration alone, whose type only vLLM knows; nothing else is in the folder."""
    config = {
        "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "vocab_size": 500,
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "bias": False,
        "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_act": "silu",
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = examine(Options(str(tmp_path)))
    assert (report.outcome, report.compared_with) == (OK, "vLLM's own modules"), report.reason
    assert report.architecture == "InternLM2ForCausalLM"
    assert "transformers has no causal language model" in report.reason
    errors = {one.site: one.error for one in report.sites if one.outcome == OK}
    assert errors == dict.fromkeys((*OUTER, "embed", "final_norm"), 0.0)
    assert {one.name for one in report.operations} == {*OPERATIONS}
    steered = {(one.site, one.layer) for one in report.operations if one.name == "Steer"}
    assert steered == {*((site, layer) for site in OUTER for layer in range(3)), *ENDS}


def test_an_encoder_decoder_has_the_verdict_of_an_engine_that_is_started_with_it():
    config = hf.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
    report = examine_config(Options("Whisper"), config)
    assert (report.outcome, report.status) == (REFUSED, 2), report.reason
    assert "an encoder-decoder model: an encoder's rows are not a request's tokens" in report.reason


def test_a_multimodal_class_is_compared_with_an_image_in_the_prompt(monkeypatch):
    """The rows at the image are its embeddings, which some layers get parts of."""
    rows = {}
    generate = OwnModules.generate

    def kept(self, prompt, count, changes=None):
        tokens, forward = generate(self, prompt, count, changes)
        if list(prompt) in self.image_prompts and not changes:
            rows.update({tap: values[: len(prompt)] for tap, values in forward.values.items()})
        return tokens, forward

    monkeypatch.setattr(OwnModules, "generate", kept)
    text = {"rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20]}}
    config = hf.Qwen3VLConfig(text_config=text, architectures=["Qwen3VLForConditionalGeneration"])
    report = examine_config(Options("Qwen3-VL"), config)
    assert (report.outcome, report.images) == (OK, DRAWN), report.reason
    assert report.architecture == "Qwen3VLForConditionalGeneration"
    assert report.compared_with == "vLLM's own modules"
    imaged = [one for one in report.operations if "with an image" in one.name]
    assert {one.name for one in imaged} == {*WITH_IMAGE}
    assert {one.outcome for one in imaged} == {OK}
    entering = rows["resid_pre", 0]
    assert len(entering) == 18 + LENGTH
    assert torch.allclose(entering[9 : 9 + LENGTH].std(), torch.tensor(STD), rtol=0.2)
    assert ("embed", 0) not in rows
    # The second layer gets a part of the image's embeddings too.
    added = (rows["resid_pre", 1] - rows["resid_post", 0]).norm(dim=-1)
    assert [index for index, size in enumerate(added) if size > 0.1] == [*range(9, 9 + LENGTH)]


@pytest.mark.nightly
def test_an_image_through_a_tower_is_compared_with_transformers_too(tiny_models):
    path = vision.served(vision.make("qwen3vl", tiny_models))
    text = f"the {vision.MODELS['qwen3vl'].mark} is in the hat"
    report = examine(Options(str(path), size=None, images=PROCESSED, text=text))
    assert (report.outcome, report.images, report.reason) == (OK, PROCESSED, "")
    assert report.compared_with == "transformers and vLLM's own modules"
    sites = {one.site for one in report.sites if one.outcome == OK}
    assert {*OUTER, "embed", "final_norm", "q", "mlp_act"} <= sites
    assert {one.name for one in report.operations} >= {*WITH_IMAGE, *OPERATIONS, *OF_PARTS}


def test_rows_of_an_image_that_differ_are_wrong(monkeypatch):
    """Only requests with a plan get another embedding at the image."""
    embed = drawn_images._embed

    def other(self, **inputs):
        again = [rows + 0.01 * len(seen) for rows in embed(self, **inputs)]
        seen.append(1)
        return again

    seen: list[int] = []
    monkeypatch.setattr(drawn_images, "_embed", other)
    config = hf.LlavaConfig(architectures=["LlavaForConditionalGeneration"])
    report = examine_config(Options("LLaVA"), config)
    assert report.outcome == WRONG
    assert "resid_pre of layer 0" in report.reason


@pytest.mark.nightly
def test_the_class_that_is_served_is_loaded_or_it_is_said_that_it_is_not():
    config = hf.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"])
    report = examine_config(Options("Gemma 3"), config)
    assert report.outcome == OK, report.reason
    if importlib.util.find_spec("torchvision"):
        assert report.architecture == "Gemma3ForConditionalGeneration"
    else:
        assert report.architecture == "Gemma3ForCausalLM"
        assert "Gemma3ForConditionalGeneration" in report.reason
        assert "its language model alone was loaded" in report.reason


@pytest.mark.nightly
def test_a_small_copy_says_what_its_layers_lack(tmp_path):
    """A parallel block has no place between attention and the MLP."""
    hf.CohereConfig(num_hidden_layers=40).save_pretrained(tmp_path)
    report = examine(Options(str(tmp_path)))
    assert (report.outcome, report.reason) == (OK, "")
    lacking = {(one.site, one.reason) for one in report.sites if one.outcome == LACKING}
    assert {site for site, _ in lacking} == {"resid_mid", "router"}
    assert any("parallel" in reason for _, reason in lacking)


@pytest.mark.nightly
@pytest.mark.usefixtures("no_sums")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_convention_that_reads_half_of_the_stream_is_wrong_where_it_does(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setitem(conventions.CONVENTIONS, LLAMA, dead(NORM))
    report = examine(Options(str(tiny_llama), size=None, dtype=dtype))
    assert (report.outcome, report.status) == (WRONG, 1)
    wrong = {(one.site, one.layer) for one in report.sites if one.outcome == WRONG}
    # Layer 0 is entered by one tensor; at its exit, and from there on, half is missed.
    assert wrong == {("resid_post", 0), ("resid_pre", 1), ("resid_post", 1), ("resid_pre", 2),
                     ("resid_post", 2)}  # fmt: skip
    assert "resid_post of layer 0" in report.reason


@pytest.mark.nightly
@pytest.mark.usefixtures("no_sums")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_edit_that_is_not_written_is_wrong_though_all_is_read_rightly(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    fire = taps._fire

    def on_a_copy(module, table, hidden, residual):
        fire(module, table, hidden.clone(), residual)

    monkeypatch.setattr(taps, "_fire", on_a_copy)
    report = examine(Options(str(tiny_llama), size=None, dtype=dtype))
    assert (report.outcome, report.status) == (WRONG, 1)
    assert {one.site for one in report.sites if one.outcome != OK} == {"router"}
    bad = {one.name for one in report.operations if one.outcome == WRONG}
    assert bad == set(OPERATIONS) - {"Probe"}


@pytest.mark.nightly
def test_halves_of_a_gated_mlp_that_are_taken_for_each_other_are_wrong(tiny_llama, monkeypatch):
    monkeypatch.setattr(inner_sites, "GATE_FIRST", inner_sites.GATE_SECOND)
    monkeypatch.setattr(inner_sites, "GATE_SECOND", frozenset(("SiluAndMul",)))
    report = examine(Options(str(tiny_llama), size=None))
    assert (report.outcome, report.status) == (WRONG, 1)
    wrong = {one.site for one in report.sites if one.outcome == WRONG}
    assert wrong == {"mlp_pre", "mlp_pre_linear"}


@pytest.mark.nightly
def test_a_refused_class_is_refused_with_its_reason(tiny_llama, monkeypatch):
    monkeypatch.setitem(conventions.CONVENTIONS, LLAMA, Refusal("its stream is a torus"))
    report = examine(Options(str(tiny_llama), size=None))
    assert (report.outcome, report.status) == (REFUSED, 2)
    assert "LlamaDecoderLayer, cannot be tapped: its stream is a torus" in report.reason


def test_what_has_no_language_model_cannot_be_built_and_says_why(tmp_path):
    report = examine_config(Options("a ViT"), hf.ViTConfig())
    assert (report.outcome, report.status) == ("cannot be built", 2)
    assert "no small copy of it can be made" in report.reason
    missing = examine(Options(str(tmp_path / "nothing")))
    assert missing.status == 2
    assert "cannot read its configuration" in missing.reason
