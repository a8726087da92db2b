"""What a caller holds in hand: by name, by position, on disk and in a notebook."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.results.activations import Activations, rows_after, with_heads
from midstream.results.arrays import Heads
from midstream.results.encoded_rows import Rows
from midstream.results.gathered_rows import GatheredRows, RowGroup
from midstream.results.media_span import MediaSpan
from midstream.results.serialization import pack, unpack
from midstream.results.stack import stack

TOKENS = torch.tensor([11, 12, 13, 14, 15, 16])


def make(dtype=torch.float32, **positions):
    """Two taps of width 4; every value tells its tap and its position."""
    taps = {("resid_pre", 2): [0, 1, 4], ("resid_post", 10): [0, 1, 4]}
    taps.update({("resid_post", int(name[1:])): found for name, found in positions.items()})
    return Activations(
        {tap: rows(tap, found).to(dtype) for tap, found in taps.items()},
        {tap: torch.tensor(found, dtype=torch.int64) for tap, found in taps.items()},
        TOKENS,
    )


def rows(tap, positions):
    return torch.tensor(
        [[tap[1], position, len(tap[0]), 0.5] for position in positions]
    ).reshape(-1, 4)  # fmt: skip


def test_a_sites_alias_finds_the_same_vectors():
    found = make()
    assert found["post_block", 10] is found["resid_post", 10]
    assert found["pre_attn", 2] is found["resid_pre", 2]
    assert found["resid_post", 10].tolist() == rows(("resid_post", 10), [0, 1, 4]).tolist()
    assert ("post_block", 10) in found
    assert found.positions_of("post_block", 10).tolist() == [0, 1, 4]
    assert found.token_ids_of("pre_attn", 2).tolist() == [11, 12, 15]


def test_what_was_not_captured_is_a_key_error_that_lists_what_was():
    for key, more in (
        (("resid_post", 2), ""),
        (("resid_mid", 10), ""),
        (("nonsense", 10), "; 'nonsense' is no site"),
        ("resid_mid", ""),
        (10, '; a key is (site, layer), as ["resid_post", 3]; a site alone has all layers'),
    ):
        found = make()
        assert key not in found, key
        with pytest.raises(KeyError) as caught:
            found[key]
        assert caught.value.args[0] == (
            f"{key!r} was not captured; there is resid_pre, resid_post; layers 2, 10; "
            f"3 rows of 4, float32{more}"
        )
        if isinstance(key, tuple):
            with pytest.raises(KeyError, match="was not captured"):
                found.positions_of(*key)
    for key in ("blocks.3.hook_resid_post", ("x", 1), 1.5, ("resid_post", "10")):
        assert key not in found, key
        with pytest.raises(KeyError, match="was not captured; there is resid_pre"):
            found[key]


def test_it_is_a_mapping_of_what_was_captured():
    found = make(_11=[3])
    taps = [("resid_pre", 2), ("resid_post", 10), ("resid_post", 11)]
    assert list(found) == list(found.keys()) == taps
    assert len(found) == 3
    assert [key for key, _ in found.items()] == taps
    assert all(value is found[key] for key, value in found.items())
    assert found.sites == ("resid_pre", "resid_post")
    assert found.layers == (2, 10, 11)


def test_positions_and_tokens_speak_for_all_where_all_are_alike():
    found = make()
    assert found.positions.tolist() == [0, 1, 4]
    assert found.token_ids.tolist() == [11, 12, 15]


def test_positions_that_differ_between_taps_must_be_asked_for_by_tap():
    for other in ([0, 1], [0, 1, 5], [], [0]):
        found = make(_11=other)
        for name in ("positions", "token_ids"):
            with pytest.raises(ValueError, match="at different positions; use positions_of"):
                getattr(found, name)
        assert found.positions_of("resid_post", 11).tolist() == other
        assert found.token_ids_of("resid_post", 11).tolist() == TOKENS[other].tolist()


def test_nothing_captured_is_empty_and_not_an_accident():
    found = Activations({}, {}, TOKENS)
    assert repr(found) == "Activations(nothing captured)"
    assert len(found) == 0
    assert found.positions.tolist() == []
    assert found.token_ids.tolist() == []
    with pytest.raises(KeyError, match="there is nothing captured"):
        found["resid_post", 1]


def test_bfloat16_becomes_float32_in_numpy_and_the_rest_stays():
    for dtype, wanted in (
        (torch.bfloat16, np.float32),
        (torch.float16, np.float16),
        (torch.float32, np.float32),
    ):
        found = make(dtype).numpy()
        assert set(found) == {("resid_pre", 2), ("resid_post", 10)}
        value = found["resid_post", 10]
        assert value.dtype == wanted
        assert value.tolist() == rows(("resid_post", 10), [0, 1, 4]).tolist()


def test_a_saved_file_gives_back_vectors_positions_and_tokens(tmp_path):
    found = make(torch.bfloat16, _11=[3], _12=[])
    path = found.save(str(tmp_path / "one.safetensors"))
    assert path == tmp_path / "one.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "midstream.activations", "version": "1"}
        assert len(list(file.keys())) == 3 * len(found)
        for site, layer in found:
            value = file.get_tensor(f"{site}.{layer}")
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, found[site, layer])
            positions = file.get_tensor(f"{site}.{layer}.positions")
            assert torch.equal(positions, found.positions_of(site, layer))
            tokens = file.get_tensor(f"{site}.{layer}.token_ids")
            assert torch.equal(tokens, found.token_ids_of(site, layer))


def test_taps_that_share_one_block_of_memory_are_saved_each_for_itself(tmp_path):
    for count in (1, 3):
        block, at = torch.arange(count * 2 * 4.0).view(count, 2, 4), torch.arange(count)
        taps = {("resid_pre", 0): block[:, 0], ("resid_post", 0): block[:, 1]}
        found = Activations(taps, dict.fromkeys(taps, at), at)
        with safe_open(found.save(tmp_path / "shared.safetensors"), "pt") as file:
            for (site, layer), rows_of_tap in taps.items():
                assert torch.equal(file.get_tensor(f"{site}.{layer}"), rows_of_tap)


def test_its_repr_is_one_readable_line():
    assert repr(make()) == (
        "Activations(resid_pre, resid_post; layers 2, 10; 3 rows of 4, float32)"
    )
    assert repr(make(torch.bfloat16, _11=[3], _12=[1, 2])) == (
        "Activations(resid_pre, resid_post; layers 2, 10–12; 1–3 rows of 4, bfloat16)"
    )


def test_its_html_has_a_row_for_each_tap_with_its_positions():
    shown = make(_11=[0, 1, 2, 4])._repr_html_()
    assert shown.count("<tr>") == 1 + 3
    assert "<td>resid_pre</td><td>2</td><td>3 × 4</td><td>0–1, 4</td>" in shown
    assert "<td>resid_post</td><td>11</td><td>4 × 4</td><td>0–2, 4</td>" in shown


def test_its_html_is_escaped():
    tap = ("<script>", 1)
    shown = Activations({tap: torch.zeros(1, 4)}, {tap: torch.zeros(1).long()}, TOKENS)
    assert "<td>&lt;script&gt;</td>" in shown._repr_html_()


def test_rows_of_two_widths_are_shown_with_both_and_stacked_only_by_width():
    at = torch.arange(2)
    taps = {("attn_out", 0): torch.ones(2, 8), ("attn_out", 1): torch.ones(2, 12)}
    acts = Activations(taps, dict.fromkeys(taps, at), torch.arange(3))
    assert repr(acts) == "Activations(attn_out; layers 0–1; 2 rows of 8 or 12, float32)"
    with pytest.raises(ValueError, match="attn_out is 12 wide at layer 1 and 8 at layer 0, so"):
        acts["attn_out"]
    with pytest.raises(SpecError, match=r"outputs\[0\]: .* differ in width .*: 8, 12, which"):
        stack([acts])
    assert stack([acts, acts], layers=1).shape == (2, 1, 2, 12)


Z, K, STREAM = ("z", 3), ("k", 3), ("resid_post", 3)
HEADS = {Z: Heads(4), K: Heads(2, (1,))}


def of_heads(kind="tensors", dtype=torch.float32):
    """Three rows of 4 query heads of 2, of 2 key heads of 2 of which one is shown, and of none."""
    values = {Z: torch.randn(3, 8).to(dtype), K: torch.randn(3, 4).to(dtype)}
    values[STREAM] = torch.randn(3, 8).to(dtype)
    at = torch.arange(3)
    if kind == "tensors":
        return values, Activations(values, dict.fromkeys(values, at), TOKENS, heads=HEADS)
    codec = parse_codec("raw" if kind == "gathered" else kind)
    groups = []
    for taps in ([Z, STREAM], [K]):
        chunk = torch.stack([codec.encode(values[tap]) for tap in taps], 1)
        block = SimpleNamespace(taps=taps, chunks=[chunk], is_leased=True)
        nothing = Rows(codec, values[taps[0]].shape[1], dtype, (), ())
        groups.append(RowGroup(tuple(taps), at, [block], None, nothing))
        values |= {
            tap: codec.decode(codec.encode(values[tap]), values[tap].shape[1], dtype)
            for tap in taps
        }
    rows = GatheredRows([Z, K, STREAM], groups)
    return values, Activations(rows, rows.positions(), TOKENS, heads=HEADS)


KINDS = ["tensors", "gathered", "full8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sites_of_heads_have_a_dimension_of_heads_and_others_none(kind, dtype):
    values, found = of_heads(kind, dtype)
    assert torch.equal(found["z", 3], values[Z].view(3, 4, 2))
    assert torch.equal(found["k", 3], values[K].view(3, 2, 2)[:, [1]])
    assert torch.equal(found["resid_post", 3], values[STREAM])
    assert found["z", 3].dtype == values[Z].dtype
    assert {tap: tuple(value.shape) for tap, value in found.items()} == {
        Z: (3, 4, 2), K: (3, 1, 2), STREAM: (3, 8),
    }  # fmt: skip
    assert found.numpy()[Z].shape == (3, 4, 2)
    assert found["z"].shape == (1, 3, 4, 2)
    assert found.to_transformer_lens()["blocks.3.attn.hook_z"].shape == (1, 3, 4, 2)
    assert found.heads == HEADS
    assert found.counts() == {Z: 3, K: 3, STREAM: 3}


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_rows_are_of_all_heads(kind):
    _, found = of_heads(kind)
    whole = with_heads(found, {})
    for tap in found:
        assert torch.equal(found.encoded(*tap), whole.encoded(*tap))
    assert whole["z", 3].shape == (3, 8)
    assert whole["k", 3].shape == (3, 4)
    assert with_heads(found, HEADS) is found


def test_rows_of_all_heads_are_a_view_that_leaves_the_process_alone():
    _, found = of_heads("gathered")
    memory = found.held.values.groups[0].blocks[0].chunks[0]
    shown = found["z", 3]
    assert shown.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    left = pickle.loads(pickle.dumps(shown))
    assert torch.equal(left, shown)
    assert left.untyped_storage().nbytes() == shown.nbytes
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(again["k", 3], found["k", 3])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_later_rows_have_the_same_heads(kind):
    _, found = of_heads(kind)
    for other in (found.copy(), pickle.loads(pickle.dumps(found))):
        assert {tap: value.tolist() for tap, value in other.items()} == {
            tap: value.tolist() for tap, value in found.items()
        }
    later = rows_after(found, {Z: 0}, [Z])
    assert torch.equal(later["z", 3], found["z", 3][1:])
    assert later.heads == {Z: Heads(4)}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_shown_in_words_and_in_html(kind):
    _, found = of_heads(kind)
    assert (
        repr(found)
        == "Activations(k, z, resid_post; layers 3; 3 rows of 1 × 2 or 4 × 2 or 8, float32)"
    )
    shown = found._repr_html_()
    assert "<td>z</td><td>3</td><td>3 × 4 × 2</td>" in shown
    assert "<td>k</td><td>3</td><td>3 × 1 × 2</td>" in shown
    assert "<td>resid_post</td><td>3</td><td>3 × 8</td>" in shown


def test_heads_are_stacked_only_where_there_are_as_many():
    taps = {("z", 0): torch.randn(2, 8), ("z", 1): torch.randn(2, 8)}
    at = dict.fromkeys(taps, torch.arange(2))
    same = Activations(taps, at, TOKENS, heads=dict.fromkeys(taps, Heads(4, (0, 3))))
    assert same["z"].shape == (2, 2, 2, 2)
    assert stack([same, same]).shape == (2, 2, 2, 2, 2)
    last = stack([same, same], "z", 1, row=-1)
    assert torch.equal(last[0, 0], taps["z", 1][-1].view(4, 2)[[0, 3]])
    other = Activations(taps, at, TOKENS, heads={("z", 0): Heads(4), ("z", 1): Heads(4, (2,))})
    with pytest.raises(ValueError, match="z is 1 × 2 wide at layer 1 and 4 × 2 at layer 0, so"):
        other["z"]
    with pytest.raises(
        SpecError, match=r"outputs\[0\]: .* differ in width .*: 1 × 2, 4 × 2, which"
    ):
        stack([other])
    with pytest.raises(
        SpecError, match=r"outputs\[1\]: .* differ in width .*: 1 × 2, 2 × 2, which"
    ):
        stack([same, other], layers=1)


@pytest.mark.parametrize("codec", [None, "full8:per=dim"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_saved_and_loaded_and_the_file_has_all_of_them(tmp_path, kind, codec):
    values, found = of_heads(kind)
    path = found.save(tmp_path / "rows.safetensors", codec)
    again = Activations.load(path)
    assert again.heads == HEADS
    if codec is None:
        assert all(torch.equal(again[tap], value) for tap, value in found.items())
        with safe_open(path, "pt") as file:
            assert torch.equal(file.get_tensor("k.3"), values[K])
    assert again["k", 3].shape == (3, 1, 2)
    assert Activations.load(again.save(tmp_path / "again.safetensors"))["z", 3].shape == (3, 4, 2)


def test_copies_say_where_the_media_of_the_prompt_are():
    known = make()
    assert known.positions_of_media == ()
    spans = (MediaSpan("image", 0, 1, 3),)
    shown = with_heads(known, {}, spans)
    assert shown.positions_of_media == spans
    assert shown.copy().positions_of_media == spans
    assert pickle.loads(pickle.dumps(shown)).positions_of_media == spans
    later = rows_after(shown, {}, list(shown))
    assert later.positions_of_media == spans
    assert with_heads(shown, {}).positions_of_media == spans
    assert with_heads(shown, {}, ()).positions_of_media == ()


def test_files_say_where_the_media_of_the_prompt_are(tmp_path):
    spans = (MediaSpan("image", 0, 1, 3, "a1"), MediaSpan("audio", 0, 9, 2))
    shown = with_heads(make(), {}, spans)
    assert Activations.load(shown.save(tmp_path / "rows.safetensors")).positions_of_media == spans
    packed = pack(shown, 4, torch.float32)
    assert unpack(packed).positions_of_media == spans
    assert unpack(pack(make(), 4, torch.float32)).positions_of_media == ()
    with pytest.raises(SpecError, match="media .*expected a JSON list of objects with `kind`"):
        unpack(packed.replace(b'\\"index\\":0', b'\\"index\\":x', 1))
