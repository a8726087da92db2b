"""The doctor on engines: right models are ok, and what is broken is found, where it is broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf
from support.engines import prepare_vllm

from midstream.lab.tools.doctor.cases import OF_PARTS, OPERATIONS
from midstream.lab.tools.doctor.examine import Options, examine, examine_config
from midstream.lab.tools.doctor.report import LACKING, OK, REFUSED, WRONG
from midstream.runtime.models import inner_sites
from midstream.runtime.models import registry as conventions
from midstream.runtime.models.convention import Refusal, dead
from midstream.runtime.worker.taps import taps
from midstream.sites import IN_LAYERS, INNER

LLAMA = ("model_executor.models.llama", "LlamaDecoderLayer")
NORM = "post_attention_layernorm"


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """As the command has it: the engines are eager, and vLLM's sampler need not be compiled."""
    prepare_vllm()
    with torch._dynamo.config.patch(disable=True):
        yield


ENDS = (("embed", 0), ("final_norm", 2))


def test_a_right_model_is_ok_at_every_site_of_every_layer_and_in_every_operation(
    tiny_llama: Path,
) -> None:
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


@pytest.mark.nightly
def test_a_small_copy_says_what_its_layers_lack(tmp_path: Path) -> None:
    """A parallel block has no place between attention and the MLP."""
    hf.CohereConfig(num_hidden_layers=40).save_pretrained(tmp_path)
    report = examine(Options(str(tmp_path)))
    assert (report.outcome, report.reason) == (OK, "")
    lacking = {(one.site, one.reason) for one in report.sites if one.outcome == LACKING}
    assert {site for site, _ in lacking} == {"resid_mid", "router"}
    assert any("parallel" in reason for _, reason in lacking)


@pytest.mark.nightly
def test_a_convention_that_reads_half_of_the_stream_is_wrong_where_it_does(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(conventions.CONVENTIONS, LLAMA, dead(NORM))
    report = examine(Options(str(tiny_llama), size=None))
    assert (report.outcome, report.status) == (WRONG, 1)
    wrong = {(one.site, one.layer) for one in report.sites if one.outcome == WRONG}
    # Layer 0 is entered by one tensor; at its exit, and from there on, half is missed.
    assert wrong == {("resid_post", 0), ("resid_pre", 1), ("resid_post", 1), ("resid_pre", 2),
                     ("resid_post", 2)}  # fmt: skip
    assert "resid_post of layer 0" in report.reason


@pytest.mark.nightly
def test_an_edit_that_is_not_written_is_wrong_though_all_is_read_rightly(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fire = taps._fire

    def on_a_copy(module, table, hidden, residual):
        fire(module, table, hidden.clone(), residual)

    monkeypatch.setattr(taps, "_fire", on_a_copy)
    report = examine(Options(str(tiny_llama), size=None))
    assert (report.outcome, report.status) == (WRONG, 1)
    assert {one.site for one in report.sites if one.outcome != OK} == {"router"}
    bad = {one.name for one in report.operations if one.outcome == WRONG}
    assert bad == set(OPERATIONS) - {"Probe"}


@pytest.mark.nightly
def test_halves_of_a_gated_mlp_that_are_taken_for_each_other_are_wrong(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_sites, "GATE_FIRST", inner_sites.GATE_SECOND)
    monkeypatch.setattr(inner_sites, "GATE_SECOND", frozenset(("SiluAndMul",)))
    report = examine(Options(str(tiny_llama), size=None))
    assert (report.outcome, report.status) == (WRONG, 1)
    wrong = {one.site for one in report.sites if one.outcome == WRONG}
    assert wrong == {"mlp_pre", "mlp_pre_linear"}


@pytest.mark.nightly
def test_a_refused_class_is_refused_with_its_reason(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(conventions.CONVENTIONS, LLAMA, Refusal("its stream is a torus"))
    report = examine(Options(str(tiny_llama), size=None))
    assert (report.outcome, report.status) == (REFUSED, 2)
    assert "LlamaDecoderLayer, cannot be tapped: its stream is a torus" in report.reason


def test_what_has_no_language_model_cannot_be_built_and_says_why(tmp_path: Path) -> None:
    report = examine_config(Options("a ViT"), hf.ViTConfig())
    assert (report.outcome, report.status) == ("cannot be built", 2)
    assert "no small copy of it can be made" in report.reason
    missing = examine(Options(str(tmp_path / "nothing")))
    assert missing.status == 2
    assert "cannot read its configuration" in missing.reason
