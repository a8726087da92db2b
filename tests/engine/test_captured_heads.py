"""Rows of attention heads, by head: against transformers' hooks, and as bytes.

`system/test_async` has those of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from support import tiny
from support.engines import engine, greedy, tokens

from midstream import Capture, SpecError, stack
from midstream.results.activations import Activations
from midstream.results.serialization import pack, unpack

PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44]
HEADS, GROUPS, SIZE = 4, 2, 32
SITES = ["q", "k", "v", "rot_q", "rot_k", "z", "resid_post"]
COUNTS = {"q": HEADS, "k": GROUPS, "v": GROUPS, "rot_q": HEADS, "rot_k": GROUPS, "z": HEADS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 4 query heads and 2 key-value heads."""
    config = hf.LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=SIZE,
        max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    with engine(model, midstream={"sites": SITES}) as found:
        yield found


@pytest.fixture(scope="module")
def seen(model: Path) -> dict[tuple[str, int], torch.Tensor]:
    """What transformers' hooks see of the prompt, [rows, width]."""
    found = {}

    def keep(site: str, layer: int, value: torch.Tensor) -> None:
        found[site, layer] = value[0].detach()

    reference = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for nth, layer in enumerate(reference.model.layers):
        attention = layer.self_attn
        for site, linear in (
            ("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj),
        ):  # fmt: skip
            linear.register_forward_hook(
                lambda _, __, value, site=site, nth=nth: keep(site, nth, value)
            )
        attention.o_proj.register_forward_pre_hook(
            lambda _, given, nth=nth: keep("z", nth, given[0])
        )
    with torch.no_grad():
        reference(torch.tensor([PROMPT]))
    return found


def captured(llm: Any, capture: Any) -> Activations:
    given = [capture] if isinstance(capture, list) else capture
    (output,) = llm.generate(tokens(PROMPT), greedy(1), capture=given, use_tqdm=False)
    assert output.receipt.status == "ok"
    found: Activations = output.activations
    return found


def test_rows_are_those_of_each_head(llm: Any, seen: Any) -> None:
    found = captured(llm, Capture("all", SITES))
    for (site, layer), rows in found.items():
        if site == "resid_post":
            assert rows.shape == (len(PROMPT), tiny.HIDDEN)
            continue
        assert rows.shape == (len(PROMPT), COUNTS[site], SIZE)
        whole = found.encoded(site, layer).view(torch.float32)
        assert torch.equal(rows.flatten(1), whole)
        if (site, layer) in seen:
            wanted = seen[site, layer].unflatten(1, (COUNTS[site], SIZE))
            torch.testing.assert_close(rows, wanted, atol=2e-5, rtol=1e-4)
    assert found.to_transformer_lens()["blocks.2.attn.hook_z"].shape == (1, len(PROMPT), 4, SIZE)
    assert found.numpy()["k", 0].shape == (len(PROMPT), GROUPS, SIZE)
    assert found["z"].shape == (3, len(PROMPT), HEADS, SIZE)


def test_only_the_heads_that_were_named_are_there_in_their_order(llm: Any, seen: Any) -> None:
    found = captured(llm, Capture([0, 2], "z", heads=[3, 1]))
    for layer in (0, 2):
        wanted = seen["z", layer].unflatten(1, (HEADS, SIZE))[:, [3, 1]]
        torch.testing.assert_close(found["z", layer], wanted, atol=2e-5, rtol=1e-4)
    assert stack([found, found], row=-1).shape == (2, 2, 2, SIZE)
    one = captured(llm, {"layers": [2], "sites": ["k"], "heads": 1})
    wanted = seen["k", 2].unflatten(1, (GROUPS, SIZE))[:, [1]]
    torch.testing.assert_close(one["k", 2], wanted, atol=2e-5, rtol=1e-4)


def test_captures_of_one_tap_have_the_heads_of_both(llm: Any) -> None:
    whole = captured(llm, Capture(1, "z"))["z", 1]
    both = captured(llm, [Capture(1, "z", heads=2), Capture(1, "z", positions=[0], heads=0)])
    torch.testing.assert_close(both["z", 1], whole[:, [2, 0]])
    every = captured(llm, [Capture(1, "z", heads=2), Capture(1, ["z", "q"], positions=[0])])
    assert torch.equal(every["z", 1], whole)
    assert every["q", 1].shape == (1, HEADS, SIZE)


def test_they_come_out_of_bytes_and_files_as_they_went_in(llm: Any, tmp_path: Path) -> None:
    found = captured(llm, [Capture("all", "z", heads=[0, 2]), Capture(1, ["k", "resid_post"])])
    read = unpack(pack(found, tiny.HIDDEN, torch.float32))
    loaded = Activations.load(found.save(tmp_path / "rows.safetensors"))
    for other in (read, loaded, found.copy()):
        assert other.heads == found.heads
        assert set(other) == set(found)
        assert all(torch.equal(other[tap], value) for tap, value in found.items())
        assert np.array_equal(other.numpy()["z", 1], found.numpy()["z", 1])


def test_a_lossy_codec_is_decoded_by_head(llm: Any) -> None:
    found = captured(llm, Capture(1, "z", heads=[1, 2], codec="full8"))
    assert found["z", 1].shape == (len(PROMPT), 2, SIZE)
    whole = captured(llm, Capture(1, "z"))["z", 1]
    torch.testing.assert_close(found["z", 1], whole[:, [1, 2]], atol=0.02, rtol=0.05)
    sketches = captured(llm, Capture(1, "z", codec="rp8:k=8,seed=1"))
    assert sketches["z", 1].shape == (len(PROMPT), 8)


@pytest.mark.parametrize(
    ("capture", "problem"),
    [
        (Capture(1, "resid_post", heads=0), "resid_post of layer 1 are not of heads"),
        (Capture(1, ["z", "k"], heads=2), "head 2 is out of range: there are 2 heads .* k of"),
        (Capture(1, "z", heads=0, codec="rp8:k=8,seed=1"), "sketches of whole vectors"),
    ],
)
def test_heads_that_are_not_there_are_refused_by_name(
    llm: Any, capture: Capture, problem: str
) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        captured(llm, capture)
    assert caught.value.path == "capture.heads"
