"""Reconstructions by SAEs in the `site` op, against the formulas in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sae_cases import bound, described, random_saes, sae_case, stored
from support.site_cases import same_bits
from torch import Tensor

from midstream import SAE
from midstream.ops import layout
from midstream.ops.layout import ANY, PLAIN, WITH_MAP, Op, kind_of
from midstream.ops.sae import layout as sae_layout
from midstream.ops.sae.reference import SaeBuffers, code_rows, reconstruct

WIDTH = 24
SAES = random_saes(WIDTH, 11)
REGISTRY, MEMORY = stored(SAES, WIDTH)


def formula(sae: SAE, x: Tensor, changes: dict[int, tuple[float, float]], error: bool) -> Tensor:
    """decode(a′), or decode(a′) − decode(a) with the error term; written as one reads `SAE`."""
    w_enc, b_enc, w_dec, b_dec = (
        one.double() for one in (sae.w_enc, sae.b_enc, sae.w_dec, sae.b_dec)
    )
    x = x.double()
    mean, scale = torch.zeros(len(x), 1), torch.ones(len(x), 1)
    if sae.centered or sae.normalize == "layer_norm":
        mean = x.mean(1, keepdim=True)
    normed = x - mean
    if sae.normalize == "layer_norm":
        scale = (normed.square().sum(1, keepdim=True) / (x.shape[1] - 1)).sqrt()
        normed = normed / (scale + 1e-5)
    elif sae.normalize != "none":
        scale = normed.square().mean(1, keepdim=True).sqrt()
        normed = normed / scale
    if sae.apply_b_dec_to_input:
        normed = normed - b_dec
    code = (normed @ w_enc + b_enc).clamp(min=0)
    if sae.threshold is not None:
        code = torch.where(code > sae.threshold.double(), code, 0)
    if sae.top_k:
        least = code.sort(1, descending=True).values[:, sae.top_k - 1, None]
        code = torch.where(code >= least, code, 0)
    changed = code.clone()
    for feature, (factor, shift) in changes.items():
        changed[:, feature] = factor * code[:, feature] + shift
    if error:
        made = (changed - code) @ w_dec
        return made if sae.is_transcoder else made * scale
    made = changed @ w_dec + b_dec
    if sae.w_skip is not None:
        made = made + x @ sae.w_skip.double().T
    return made if sae.is_transcoder else made * scale + mean


@given(
    name=st.sampled_from(list(SAES)),
    mode=st.sampled_from(["set", "add", "scale", "ablate"]),
    values=st.dictionaries(st.integers(0, 32), st.floats(-4, 4, width=32), max_size=9),
    error=st.booleans(),
    seed=st.integers(0, 1000),
    size=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_a_reconstruction_is_that_of_the_formulas(name, mode, values, error, seed, size):
    asked: dict[str, Any] = {}
    if values:
        asked = {"index": list(values) if mode == "ablate" else values, "mode": mode}
        asked["error"] = error
    edit = bound(REGISTRY, name, **asked)
    changes = {
        each: {
            "set": (0.0, value), "add": (1.0, value), "scale": (value, 0.0), "ablate": (0.0, 0.0)
        }[mode]
        for each, value in values.items()
    }  # fmt: skip
    x = size * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    found = reconstruct(x, described(edit, WIDTH), MEMORY)
    wanted = formula(SAES[name], x, changes, bool(values) and error)
    error_of = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-2 * size)
    assert float(error_of.max()) <= 1e-5


def test_an_unchanged_feature_with_the_error_term_changes_no_bit():
    made = sae_case(rows=6, width=WIDTH, dtype=torch.float32, residual=True, seed=0, at_once=64)
    registry, _ = stored(random_saes(WIDTH, 0), WIDTH)
    numbers = described(bound(registry, "jumps", index=[3, 4], mode="scale", value=1, error=True),
                        WIDTH)  # fmt: skip
    made.bank[:1] = numbers.view(-1, WIDTH)
    place = made.instructions[:, layout.OP] == Op.CODE
    made.instructions[place, layout.READ] = 0
    made.params[made.instructions[:, layout.OP] == Op.RECONSTRUCT, layout.B] = 0.0
    made.instructions[made.instructions[:, layout.OP] == Op.SCALE, layout.OP] = Op.PROBE
    made.params[made.instructions[:, layout.OP] == Op.ADD, layout.A] = 0.0
    before = made.hidden.clone()
    made.run()
    assert same_bits(made.hidden, before)


def test_a_code_is_read_at_one_site_and_used_at_another():
    """Rows of other programs between, which have none, keep what was decoded."""
    made = sae_case(rows=9, width=WIDTH, dtype=torch.float32, residual=True, seed=2, at_once=64)
    is_made = made.instructions[:, layout.OP] == Op.RECONSTRUCT
    reads, writes = made.copy(), made.copy()
    reads.instructions[is_made, layout.OP] = Op.PROBE  # without a slot it does nothing
    is_code = made.instructions[:, layout.OP] == Op.CODE
    writes.instructions[is_code, layout.OP] = Op.PROBE
    writes.sae = reads.sae
    entered = made.hidden.clone()
    reads.run()
    kept = reads.hidden.clone()
    writes.run()
    made.run()
    assert torch.equal(writes.hidden, made.hidden)
    changed = int((made.hidden != entered).any(1).sum())
    assert changed > int((kept != entered).any(1).sum())


def test_what_may_be_at_one_site():
    add, gate, code, made, mapped = Op.ADD, Op.GATE, Op.CODE, Op.RECONSTRUCT, Op.MAP
    assert kind_of([add], [PLAIN]) == PLAIN
    assert kind_of([made]) == ANY
    assert kind_of([code, made]) == -1
    assert kind_of([Op.PROBE, gate, code, made, add]) == -3
    assert kind_of([gate, mapped, made]) == WITH_MAP + 1
    for wrong in ([code, made, code, made], [mapped, code], [add, code, made], [code, made, made]):
        with pytest.raises(ValueError, match=r"two|before the CODE"):
            kind_of(wrong)


@given(place=st.integers(0, 2**35))
def test_places_are_split_into_numbers_of_float32(place):
    high, low = sae_layout.split_place(place)
    rounded = [float(torch.tensor(float(one), dtype=torch.float32)) for one in (high, low)]
    assert sae_layout.place_of(*rounded) == place


def test_memory_for_activations_is_bounded():
    assert [code_rows(features) for features in (1 << 14, 1 << 17, 1 << 30)] == [4096, 512, 64]
    made = SaeBuffers.allocate(torch.zeros(4), 100, 8, 64)
    assert made.codes.shape == (0, 64), "a CPU needs none"
    assert made.nbytes == 4 * 100 * 8
