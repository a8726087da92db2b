"""Rows as bytes between processes: what went in comes out, and no hostile ones do."""

import json
import struct
import sys
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from support.codec_rows import CODECS, DTYPES, encoded, finite_rows
from support.refusals import refused

from midstream.codecs import Full8PerDim, Raw, parse_codec
from midstream.errors import SpecError
from midstream.results.activations import Activations
from midstream.results.arrays import Heads
from midstream.results.encoded_rows import Rows, Scattered
from midstream.results.gathered_rows import GatheredRows, RowGroup
from midstream.results.rows_file import FORMAT
from midstream.results.serialization import PackedRows, pack, unpack

METADATA = {"format": FORMAT, "version": "1", "codec": "raw", "hidden": "2", "dtype": "float32"}
AT = torch.tensor([0, 3])


def same_bits(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_bits_that_are_no_number_come_out_too(dtype):
    values = torch.tensor([[float("nan"), float("inf")], [-0.0, -float("inf")]], dtype=dtype)
    given_ = Activations({("resid_post", 0): values}, {("resid_post", 0): AT}, torch.arange(4))
    assert same_bits(unpack(pack(given_, 2, dtype))["resid_post", 0], values)


@pytest.mark.parametrize("spec", ["raw", "full8"])
@pytest.mark.parametrize("chosen", [None, torch.tensor([2, 0])])
@pytest.mark.parametrize("is_scattered", [False, True])
def test_rows_of_a_group_are_packed_by_their_taps_however_blocks_have_them(
    spec, chosen, is_scattered
):
    codec, taps = parse_codec(spec), [("resid_post", layer) for layer in range(3)]
    blocks, at = [], torch.tensor([4, 6] if chosen is not None else [4, 5, 6])
    for nth, order in enumerate(([2, 0, 1], [0, 1, 2])):
        values = torch.randn(2 - nth, 3, 8)
        chunk = codec.encode(values.view(-1, 8)).view(len(values), 3, -1)
        if is_scattered:
            size = chunk[0].numel()
            where = np.arange(len(values)) * size
            chunk = Scattered(chunk.flatten().numpy(), where, 3, chunk.shape[2])
        blocks.append(SimpleNamespace(taps=[taps[one] for one in order], chunks=[chunk]))
    nothing = Rows(codec, 8, torch.float32, (), ())
    rows = GatheredRows(taps, [RowGroup(tuple(taps), at, blocks, chosen, nothing)])
    given_ = Activations(rows, rows.positions(), torch.arange(9))
    found = unpack(pack(given_, 8, torch.float32))
    assert list(found) == taps
    for tap in taps:
        assert same_bits(found.encoded(*tap), given_.encoded(*tap))
        assert torch.equal(found.positions_of(*tap), at)


def test_no_rows_and_no_taps_come_out_as_none():
    none = torch.zeros(0, dtype=torch.int64)
    for spec in CODECS:
        codec = parse_codec(spec)
        rows = encoded(codec, torch.zeros(1, 8))
        if isinstance(rows, Rows):
            rows = Rows(codec, 8, torch.float32, (rows.chunks[0][:0],), (0,))
        else:
            rows = rows[:0]
        given_ = Activations({STREAM: rows}, {STREAM: none}, none)
        assert len(unpack(pack(given_, 8, torch.float32))["resid_post", 1]) == 0
    assert len(unpack(pack(Activations({}, {}, none), 8, torch.float32))) == 0


WIDE, STREAM = ("attn_out", 1), ("resid_post", 1)


def of_two_widths(codec, wide, stream, at=None):
    """Rows of a tap that may be wider than the stream, and of one that is as wide."""
    rows = {STREAM: encoded(codec, stream), WIDE: encoded(codec, wide)}
    at = torch.arange(len(wide)) if at is None else at
    return Activations(rows, dict.fromkeys(rows, at), torch.arange(7, 5007))


def metadata_of(data):
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size])["__metadata__"]


@given(
    st.sampled_from(CODECS),
    finite_rows(min_width=4),
    st.integers(0, 9),
    st.lists(st.integers(0, 4000), min_size=3, max_size=3, unique=True).map(sorted),
)
def test_every_codec_dtype_and_width_comes_out_bit_by_bit(spec, stream, more, positions):
    wide = torch.cat([stream, stream.flip(0).repeat(1, 3)[:, :more]], 1)
    codec, at, hidden = parse_codec(spec), torch.tensor(positions[: len(stream)]), stream.shape[1]
    given_ = of_two_widths(codec, wide, stream, at)
    packed = pack(given_, hidden, stream.dtype)
    assert PackedRows(given_, hidden, stream.dtype).nbytes == len(packed)
    metadata = metadata_of(packed)
    assert (metadata["version"], metadata["hidden"]) == ("2" if more else "1", str(hidden))
    assert not more or json.loads(metadata["widths"]) == {"attn_out.1": hidden + more}
    found = unpack(packed)
    assert found.codec.spec == codec.spec
    assert list(found) == [WIDE, STREAM]
    for tap in found:
        assert same_bits(found.encoded(*tap), given_.encoded(*tap))
        assert same_bits(found[tap], given_[tap])
        assert torch.equal(found.positions_of(*tap), at)
        assert torch.equal(found.token_ids_of(*tap), torch.arange(7, 5007)[at])
    if spec == "raw":
        assert same_bits(found[WIDE], wide)


@pytest.mark.parametrize("spec", ["raw", "full8"])
def test_groups_of_two_widths_are_packed_each_by_its_own(spec):
    codec, at, groups = parse_codec(spec), torch.tensor([4, 6]), []
    taps = [[("attn_out", 0), ("attn_out", 1)], [("resid_post", 0), ("resid_post", 1)]]
    for names, width in zip(taps, (12, 8), strict=True):
        chunk = codec.encode(torch.randn(4, width)).view(2, 2, -1)
        block = SimpleNamespace(taps=names, chunks=[chunk])
        nothing = Rows(codec, width, torch.float32, (), ())
        groups.append(RowGroup(tuple(names), at, [block], None, nothing))
    rows = GatheredRows([*taps[0], *taps[1]], groups)
    given_ = Activations(rows, rows.positions(), torch.arange(9))
    found = unpack(pack(given_, 8, torch.float32))
    for tap in rows:
        assert same_bits(found.encoded(*tap), given_.encoded(*tap))
        assert same_bits(found[tap], given_[tap])
        assert found[tap].shape == (2, 12 if tap[0] == "attn_out" else 8)


def test_the_file_of_one_width_is_what_it_was_whatever_the_taps():
    values = torch.ones(2, 8)
    metadata = metadata_of(pack(of_two_widths(Raw(), values, values), 8, torch.float32))
    assert list(metadata.items()) == [
        ("format", FORMAT), ("version", "1"), ("codec", "raw"), ("hidden", "8"),
        ("dtype", "float32"),
    ]  # fmt: skip


def of_heads(codec, chosen):
    """Rows of 4 heads of 3 numbers, and of the stream."""
    values = torch.randn(5, 12), torch.randn(5, 12)
    taps = {("z", 1): encoded(codec, values[0]), STREAM: encoded(codec, values[1])}
    at = dict.fromkeys(taps, torch.arange(5))
    heads = {("z", 1): Heads(4, chosen)}
    return Activations(taps, at, torch.arange(7, 5007), heads=heads)


@pytest.mark.parametrize("spec", [spec for spec in CODECS if not spec.startswith("rp8")])
@pytest.mark.parametrize("chosen", [None, (1, 3)])
def test_rows_of_heads_come_out_by_head(spec, chosen):
    given_ = of_heads(parse_codec(spec), chosen)
    packed = pack(given_, 12, torch.float32)
    assert PackedRows(given_, 12, torch.float32).nbytes == len(packed)
    metadata = metadata_of(packed)
    assert metadata["version"] == "2"
    assert "widths" not in metadata
    shown = None if chosen is None else list(chosen)
    assert json.loads(metadata["heads"]) == {"z.1": [4, shown]}
    found = unpack(packed)
    assert found.heads == given_.heads
    assert found["z", 1].shape == (5, 4 if chosen is None else 2, 3)
    for tap in found:
        assert same_bits(found[tap], given_[tap])
        assert same_bits(found.encoded(*tap), given_.encoded(*tap))
    narrow = pack(given_, 8, torch.float32)
    assert json.loads(metadata_of(narrow)["widths"]) == {"z.1": 12, "resid_post.1": 12}
    assert same_bits(unpack(narrow)["z", 1], given_["z", 1])


def test_rows_of_heads_are_read_and_saved_without_torch(monkeypatch, tmp_path):
    given_ = of_heads(Raw(), (1, 3))
    packed, wanted = pack(given_, 12, torch.float32), given_["z", 1].numpy()
    values = torch.randn(5, 12), torch.randn(5, 8)
    wide = pack(of_two_widths(Raw(), *values), 8, torch.float32)
    for name in ("torch", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    found = unpack(packed)
    assert np.array_equal(found["z", 1], wanted)
    assert np.array_equal(unpack(wide)[WIDE], values[0].numpy())
    assert np.array_equal(
        Activations.load(found.save(tmp_path / "rows.safetensors"))["z", 1], wanted
    )
    assert "5 rows of 2 × 3 or 12" in repr(found)


def test_taps_at_different_positions_keep_their_own():
    one, two = torch.tensor([0, 2]), torch.tensor([1])
    given_ = Activations(
        {("resid_post", 0): torch.ones(2, 2), ("resid_post", 1): torch.ones(1, 2)},
        {("resid_post", 0): one, ("resid_post", 1): two},
        torch.tensor([5, 6, 7]),
    )
    found = unpack(pack(given_, 2, torch.float32))
    assert found.token_ids_of("resid_post", 0).tolist() == [5, 7]
    assert found.token_ids_of("resid_post", 1).tolist() == [6]


def tensors(**changes):
    made = {
        "resid_post.1": torch.ones(2, 2),
        "resid_post.1.positions": AT,
        "resid_post.1.token_ids": AT + 1,
    }
    made |= changes
    return {name: value for name, value in made.items() if value is not None}


def test_last_positions_at_many_taps_take_no_more_memory_than_at_one():
    """Only the pages of the tokens that there are."""
    made = {}
    for layer in range(40):
        made[f"resid_post.{layer}"] = torch.ones(1, 2)
        made[f"resid_post.{layer}.positions"] = torch.tensor([(1 << 26) - 40 + layer])
        made[f"resid_post.{layer}.token_ids"] = torch.tensor([layer])
    tracemalloc.start()
    try:
        found = unpack(save(made, METADATA))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [int(found.token_ids_of("resid_post", layer)) for layer in range(40)] == [*range(40)]
    assert most < 600 << 20


def test_what_is_crafted_here_would_be_read():
    assert len(unpack(save(tensors(), METADATA))["resid_post", 1]) == 2
    metadata = {**METADATA, "version": "2", "heads": '{"resid_post.1":[2,[1]]}'}
    assert unpack(save(tensors(), metadata))["resid_post", 1].shape == (2, 1, 1)


def crafted(metadata=METADATA, **changes):
    return save(tensors(**changes), metadata)


ROWS, POSITIONS = "resid_post.1", "resid_post.1.positions"
HOSTILE = {
    "nothing": b"",
    "a short header": b"\x08\0\0",
    "a header of any length": struct.pack("<Q", 1 << 62) + b"{}",
    "no metadata": crafted(None),
    "another format": crafted({**METADATA, "format": "x" * 100_000}),
    "another version": crafted({**METADATA, "version": "3"}),
    "version 2 without widths": crafted({**METADATA, "version": "2"}),
    "version 2 without a hidden size": crafted(
        {"format": FORMAT, "version": "2", "widths": '{"resid_post.1":2}'}
    ),
    "version 1 with widths": crafted({**METADATA, "widths": '{"resid_post.1":2}'}),
    **{
        f"widths {widths[:30]}": crafted({**METADATA, "version": "2", "widths": widths})
        for widths in (
            "",
            "{}",
            '{"resid_post.1":3}',
            '{"resid_post.1":"2"}',
            '{"resid_post.1":true}',
            '{"resid_post.1":0}',
            '{"resid_post.2":2}',
            '{"resid_post.1.positions":2}',
            '{"resid_post.1":2,"resid_post.1":2}',
            '{"resid_post.1":' + "9" * 5000 + "}",
            '{"x":' * 50_000,
        )
    },
    "version 1 with heads": crafted({**METADATA, "heads": '{"resid_post.1":[2,null]}'}),
    **{
        f"heads {heads[:30]}": crafted({**METADATA, "version": "2", "heads": heads})
        for heads in (
            "",
            "{}",
            '{"resid_post.1":2}',
            '{"resid_post.1":[]}',
            '{"resid_post.1":[3,null]}',
            '{"resid_post.1":[0,null]}',
            '{"resid_post.1":[true,null]}',
            '{"resid_post.1":[2,[]]}',
            '{"resid_post.1":[2,[2]]}',
            '{"resid_post.1":[2,[1,1]]}',
            '{"resid_post.1":[2,0]}',
            '{"resid_post.2":[2,null]}',
            '{"resid_post.1.positions":[2,null]}',
            '{"resid_post.1":[2,null],"resid_post.1":[2,null]}',
            '{"resid_post.1":[' + "9" * 5000 + ",null]}",
            '{"x":' * 50_000,
        )
    },
    "an unknown codec": crafted({**METADATA, "codec": "zip"}),
    "a huge codec": crafted({**METADATA, "codec": "rp8:k=99999999999999999999"}),
    "no dtype": crafted({**METADATA, "dtype": "nn"}),
    "another dtype": crafted({**METADATA, "dtype": "float16"}),
    "no hidden size": crafted({**METADATA, "hidden": ""}),
    "a hidden size of many digits": crafted({**METADATA, "hidden": "9" * 5000}),
    "a hidden size in other digits": crafted({**METADATA, "hidden": "٢"}),
    "rows that are decoded to gigabytes": crafted(
        {**METADATA, "codec": "topk8:k=1", "hidden": "999999999"},
        **{ROWS: torch.zeros(2, 13, dtype=torch.uint8)},
    ),
    "another hidden size": crafted({**METADATA, "hidden": "3"}),
    "rows of another codec": crafted({**METADATA, "codec": "full8"}),
    "one dimension": crafted(**{ROWS: torch.ones(2)}),
    "no positions": crafted(**{POSITIONS: None}),
    "positions of another type": crafted(**{POSITIONS: AT.int()}),
    "too few positions": crafted(**{POSITIONS: AT[:1]}),
    "a negative position": crafted(**{POSITIONS: -AT}),
    "a position beyond all": crafted(**{POSITIONS: AT << 60}),
    "positions without rows": crafted(**{ROWS: None}),
    "an unknown site": crafted(**{"resid_poste.1": torch.ones(2, 2)}),
    "a layer in other digits": crafted(**{"resid_post.٣": torch.ones(2, 2)}),
    "a layer with a zero before it": crafted(**{"resid_post.01": torch.ones(2, 2)}),
    "something else beside": crafted(**{"more": torch.ones(1)}),
}


def test_hostile_bytes_are_refused():
    shortly = "(?s)^.{1,999}$"
    refused(lambda what: unpack(HOSTILE[what]), *((what, shortly) for what in HOSTILE))
    packed = pack(of_heads(parse_codec("rp8:k=16,seed=3"), None), 12, torch.float32)
    refused(unpack, (packed, "z.1: 12 numbers cannot be of heads"))


WHOLE = crafted()


@settings(max_examples=200)
@given(st.data())
def test_damaged_bytes_are_refused_or_read_as_rows(data):
    place = data.draw(st.integers(0, len(WHOLE) - 1))
    byte = data.draw(st.integers(0, 255))
    damaged = WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    cut = damaged[: data.draw(st.integers(0, len(damaged)))]
    for each in (damaged, cut):
        try:
            found = unpack(each)
        except SpecError:
            continue
        for tap in found:
            assert found[tap].shape[0] == len(found.positions_of(*tap))


def test_the_file_is_plain_safetensors():
    assert set(load(WHOLE)) == set(tensors())
    (size,) = struct.unpack_from("<Q", WHOLE)
    assert json.loads(WHOLE[8 : 8 + size])["__metadata__"] == METADATA


@given(finite_rows(), st.integers(0, 3))
def test_rows_saved_with_a_scale_per_dimension_are_read_to_half_a_step(values, dropped):
    values = values[: max(0, len(values) - dropped)]
    at = torch.arange(len(values)) * 2
    taps = [("resid_mid", 2), ("resid_post", 11)]
    given_ = Activations(
        {taps[0]: values.flip(0), taps[1]: values}, dict.fromkeys(taps, at), torch.arange(7, 5007)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = given_.save(Path(folder) / "rows.safetensors", codec="full8:per=dim")
        stored = load(path.read_bytes())["resid_post.11"]
        found = unpack(path.read_bytes())
    assert (stored.dtype, stored.shape) == (torch.uint8, (values.shape[1], 8 + len(values)))
    for tap in taps:
        assert torch.equal(found[tap], Full8PerDim().decode(Full8PerDim().encode(given_[tap])))
        assert torch.equal(found.positions_of(*tap), at)
        assert torch.equal(found.token_ids_of(*tap), given_.token_ids_of(*tap))


def test_a_scale_per_dimension_is_rejected_with_another_name_or_malformed(tmp_path):
    rows = Activations(
        {("resid_post", 0): torch.ones(2, 3)}, {("resid_post", 0): AT}, torch.arange(9)
    )
    with pytest.raises(SpecError, match="codec: expected None or \"full8:per=dim\", got 'full8'"):
        rows.save(tmp_path / "x.safetensors", codec="full8")
    metadata = {**METADATA, "codec": "full8:per=dim", "hidden": "3"}
    indices = {"resid_post.0.positions": AT, "resid_post.0.token_ids": AT.clone()}
    for block, problem in (
        (torch.zeros(3, 7, dtype=torch.uint8), "expected uint8"),
        (torch.zeros(3, 10), "expected uint8"),
        (torch.full((3, 10), 255, dtype=torch.uint8), "scale"),
        (torch.zeros(4, 10, dtype=torch.uint8), r"expected uint8 \[3, 8"),
        (torch.zeros(3, 11, dtype=torch.uint8), r"expected int64 \[3\]"),
    ):
        with pytest.raises(SpecError, match=problem):
            unpack(save({"resid_post.0": block, **indices}, metadata))
