"""Rows of attention heads, by head: against transformers' hooks, and as bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.asking import ask_all
from engine.refusals import assert_refused
from support import tiny
from support.engines import engine
from support.inner_served import reference
from support.oracle_edits import Seen

from midstream import Capture, stack
from midstream.results.activations import Activations
from midstream.results.serialization import pack, unpack

PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44]
HEADS, GROUPS, SIZE = 4, 2, 32
SITES = ["q", "k", "v", "rot_q", "rot_k", "z", "resid_post"]
COUNTS = {"q": HEADS, "k": GROUPS, "v": GROUPS, "rot_q": HEADS, "rot_k": GROUPS, "z": HEADS}


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> tuple[Path, Seen]:
    """A tiny Llama of 4 query heads and 2 key-value heads, and what hooks see of the prompt."""
    path, oracle = reference("llama", tiny_models)
    return path, oracle.run(PROMPT)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Seen]) -> Iterator[Any]:
    with engine(model[0], midstream={"sites": SITES}) as found:
        yield found


@pytest.fixture(scope="module")
def seen(model: tuple[Path, Seen]) -> dict[Any, torch.Tensor]:
    return model[1].values


def captured(llm: Any, capture: Any) -> Activations:
    given = [capture] if isinstance(capture, list) else capture
    (output,) = ask_all(llm, [PROMPT], 1, capture=given)
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
        wanted = seen[site, layer].unflatten(1, (COUNTS[site], SIZE))
        torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)
    assert found.to_transformer_lens()["blocks.2.attn.hook_z"].shape == (1, len(PROMPT), 4, SIZE)
    assert found.numpy()["k", 0].shape == (len(PROMPT), GROUPS, SIZE)
    assert found["z"].shape == (3, len(PROMPT), HEADS, SIZE)


def test_only_the_heads_that_were_named_are_there_in_their_order(llm: Any, seen: Any) -> None:
    found = captured(llm, Capture([0, 2], "z", heads=[3, 1]))
    for layer in (0, 2):
        wanted = seen["z", layer].unflatten(1, (HEADS, SIZE))[:, [3, 1]]
        torch.testing.assert_close(found["z", layer], wanted, atol=1e-4, rtol=1e-4)
    assert stack([found, found], row=-1).shape == (2, 2, 2, SIZE)
    one = captured(llm, {"layers": [2], "sites": ["k"], "heads": 1})
    wanted = seen["k", 2].unflatten(1, (GROUPS, SIZE))[:, [1]]
    torch.testing.assert_close(one["k", 2], wanted, atol=1e-4, rtol=1e-4)


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


def test_heads_that_are_not_there_are_refused_by_name(llm: Any) -> None:
    assert_refused(
        lambda capture: captured(llm, capture),
        [
            (Capture(1, "resid_post", heads=0), "capture.heads", "resid_post of layer 1 are not"),
            (Capture(1, ["z", "k"], heads=2), "capture.heads", "there are 2 heads .* k of"),
            (
                Capture(1, "z", heads=0, codec="rp8:k=8,seed=1"),
                "capture.heads",
                "sketches of whole vectors",
            ),
        ],
    )
