"""Taps whose vectors are wider or narrower than the residual stream, in one store with it."""

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_rows import CODECS
from support.nightly import rounds
from unit.store.crafting import put_together, take_apart
from unit.store.making import HIDDEN, entry, header, rows_of, same, shard_bytes, vectors, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import Entry, RowDataset, Writer, merge, prune, verify

STREAM, WIDE = ("resid_post", 1), ("attn_out", 1)
BOTH = (WIDE, STREAM)
WIDTHS = {WIDE: 12}
NAME = "shard.safetensors"
GOLDEN = "f30805132afde13d9adec11f2946d4b65bde74e50f42626aa4c64db46f14aeac"


def wide(**fields):
    return header(**({"widths": WIDTHS} | fields))


def headers(root):
    return [shard.header for shard in open_store(root).shards]


@pytest.mark.parametrize("codec", ["raw", "full8", "rp8:k=64,seed=3", "topk8:k=4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_tap_reads_as_the_codec_decodes_rows_of_its_width(tmp_path, codec, dtype):
    head = wide(codec=codec, dtype=dtype)
    write(tmp_path, [entry("a", rows=4, taps=BOTH, head=head)], head)
    store = open_store(tmp_path)
    assert verify(tmp_path).ok
    for nth, tap in enumerate(BOTH):
        values = vectors(nth, 4, head, tap)
        assert values.shape[1] == {WIDE: 12, STREAM: HIDDEN}[tap]
        encoded = head.open_codec().encode(values)
        decoded = head.open_codec().decode(encoded, values.shape[1], values.dtype)
        assert same(store.get("a").encoded(*tap), encoded)
        assert same(store.get("a")[tap], decoded)
        (batch,) = store.select(site=tap[0], layer=tap[1]).batches(10)
        assert same(batch.encoded, encoded)
        assert same(batch.values, decoded)


SITES = st.sampled_from(["resid_pre", "attn_out", "mlp_out", "resid_post"])


@settings(max_examples=rounds(suite=25, nightly=1000))
@given(
    codec=st.sampled_from(CODECS),
    widths=st.dictionaries(st.tuples(SITES, st.integers(0, 3)), st.integers(4, 20), min_size=1),
    hidden=st.integers(4, 20),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_any_widths_come_back(tmp_path_factory, codec, widths, hidden, rows):
    root = tmp_path_factory.mktemp("any")
    head = header(hidden_size=hidden, widths=widths, codec=codec, dtype="float32")
    taps = tuple(widths)
    write(
        root,
        [
            entry(str(nth), rows=count, taps=taps[nth:] + taps[:1], head=head)
            for nth, count in enumerate(rows)
        ],
        head,
    )
    assert verify(root).ok
    store = open_store(root)
    for nth, count in enumerate(rows):
        made = entry(str(nth), rows=count, taps=taps[nth:] + taps[:1], head=head)
        found = store.get(str(nth))
        assert set(found) == set(made.taps)
        for tap in found:
            assert same(found.encoded(*tap), made.taps[tap].data)
            wanted = head.open_codec().decode(made.taps[tap].data, widths[tap], torch.float32)
            assert same(found[tap], wanted)


def test_a_shard_without_another_width_is_that_of_a_model_without_one():
    rows = [entry("a", taps=[STREAM])]
    for widths in ({}, WIDTHS, {STREAM: HIDDEN}):
        assert shard_bytes(rows, header(widths=widths)) == shard_bytes(rows)


def test_the_header_has_the_widths_of_the_taps_in_the_shard_and_version_2():
    head = wide(widths={("mlp_out", 0): 3, **WIDTHS, ("resid_mid", 7): 5})
    taps = (*BOTH, ("mlp_out", 0))
    about = take_apart(shard_bytes([entry("a", taps=taps, head=head)], head))[0]["__metadata__"]
    assert about["version"] == "2"
    assert list(about)[6:9] == ["hidden_size", "widths", "dtype"]
    assert about["widths"] == '{"mlp_out.0":3,"attn_out.1":12}'
    assert about["hidden_size"] == str(HIDDEN)


def test_the_bytes_of_version_2_never_change():
    head = wide(hidden_size=2, dtype="float16", widths={WIDE: 3})
    values = torch.arange(6, dtype=torch.float16)
    taps = {
        STREAM: rows_of(values.view(3, 2), head),
        WIDE: rows_of(values[:3, None] + values[3:], head),
    }
    data = shard_bytes([Entry(request="a", prompt_tokens=2, taps=taps)], head)
    digest = hashlib.sha256(data).hexdigest()
    assert digest == GOLDEN, "shards that are out there would not be read any more"


def test_rows_and_codecs_that_do_not_fit_the_width_of_a_tap_are_refused(tmp_path):
    with (
        Writer(tmp_path, wide(dtype="float32")) as writer,
        pytest.raises(StoreError, match=r"attn_out', 1\].data: expected shape \[3, 48\]"),
    ):
        writer.add(entry("a", taps=BOTH, head=header(dtype="float32")))
    head = wide(codec="topk8:k=6", widths={WIDE: 4})
    made = entry("a", taps=[STREAM], head=head)
    other = Entry(request="b", prompt_tokens=2, taps={WIDE: made.taps[STREAM]})
    with Writer(tmp_path, head) as writer:
        writer.add(made)
        with pytest.raises(StoreError, match=r"attn_out\.1: codec.k: expected at most 4"):
            writer.add(other)


@pytest.mark.parametrize(
    ("widths", "problem"),
    [
        (3, "widths: expected pairs of tap and width, got `int`"),
        ({"attn_out": 3}, "widths: expected .site, layer."),
        ({("attn_oat", 1): 3}, "widths: expected .site, layer. of a site of `embed`"),
        ({("attn_out", -1): 3}, "widths: layer: expected 0 to 65535"),
        ({WIDE: 0}, r"widths: attn_out\.1: expected 1 to 1048576, got 0"),
    ],
)
def test_widths_that_cannot_be_are_refused(widths, problem):
    with pytest.raises(StoreError, match=problem):
        header(widths=widths)


def forged(**about):
    described, parts = take_apart(shard_bytes([entry("a", taps=BOTH, head=wide())], wide()))
    described["__metadata__"] |= about
    return put_together(described, parts)


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"version": "1"}, "not in canonical form"),
        ({"version": "3"}, "unsupported format version '3'; expected 1 or 2"),
        ({"widths": "{}"}, "tensor 'g0.attn_out.1': expected"),
        ({"widths": '{"attn_out.1":13}'}, "tensor 'g0.attn_out.1': expected"),
        ({"widths": '{"attn_out.1":12,"resid_post.1":8}'}, "not in canonical form"),
        ({"widths": '{"attn_out.1":12,"mlp_out.1":3}'}, "mlp_out.1 is no site and layer of the"),
        ({"widths": '{"attn_out.1":12,"attn_out.1":12}'}, "duplicate JSON field"),
        ({"widths": '{"attn_out.01":12}'}, "expected names such as attn_out.1"),
        ({"widths": '{"attn_oat.1":12}'}, "of a site of"),
        ({"widths": '{"attn_out.99999":12}'}, "widths: layer: expected 0 to 65535"),
        ({"widths": '{"attn_out.1":1e99}'}, "expected `int`, got `float`"),
        ({"widths": '{"attn_out.1":99999999999}'}, "expected 1 to 1048576"),
        ({"widths": "[12]"}, "expected a JSON object as text"),
        ({"widths": {"attn_out.1": 12}}, "expected a JSON object as text|not in canonical form"),
        ({"widths": "{" * 9000}, "widths: "),
    ],
)
def test_a_header_whose_widths_cannot_be_is_refused(tmp_path, about, problem):
    (tmp_path / NAME).write_bytes(forged())
    assert verify(tmp_path).ok
    (tmp_path / NAME).write_bytes(forged(**about))
    with pytest.raises(StoreError, match=problem) as caught:
        open_store(tmp_path).get("a")
    assert str(caught.value).startswith(f"{tmp_path / NAME}: ")
    assert len(str(caught.value)) < 1000
    assert not verify(tmp_path).ok


def test_version_2_without_widths_is_refused(tmp_path):
    described, parts = take_apart(shard_bytes([entry("a")]))
    described["__metadata__"]["version"] = "2"
    (tmp_path / NAME).write_bytes(put_together(described, parts))
    with pytest.raises(StoreError, match="not in canonical form"):
        open_store(tmp_path).get("a")


def test_any_text_as_widths_is_read_or_refused(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")

    @settings(max_examples=rounds(suite=60, nightly=5000))
    @given(st.text(st.sampled_from('{}[]":,.0123456789attn_out'), max_size=40))
    def check(text):
        (root / NAME).write_bytes(forged(widths=text))
        if text != '{"attn_out.1":12}':
            assert not verify(root).ok

    check()


def test_rows_of_two_widths_are_not_read_together(tmp_path):
    write(tmp_path, [entry("a", taps=BOTH, head=wide())], wide())
    rows = open_store(tmp_path).select()
    assert len(rows) == 6
    assert "6 rows of 12 or 8, raw" in repr(rows)
    problem = r"the rows differ in width: 12 at attn_out\.1, 8 at resid_post\.1; select those"
    for read in (rows.batches, lambda n: rows.take([0, n + 1]), lambda n: RowDataset(rows, n)):
        with pytest.raises(StoreError, match=problem):
            read(2)
    one = open_store(tmp_path).select(site="attn_out")
    assert one.width() == 12
    assert [len(batch["values"][0]) for batch in RowDataset(one, 3)] == [12]


def test_merged_shards_keep_the_widths_of_all_their_taps(tmp_path):
    other = ("attn_out", 3)
    head = wide(widths={**WIDTHS, other: 5})
    for nth, taps in enumerate(([STREAM], BOTH, [other, STREAM])):
        write(tmp_path, [entry(str(nth), taps=taps, head=head, seed=nth)], head)
    assert [each.widths for each in headers(tmp_path)] == [(), ((WIDE, 12),), ((other, 5),)]
    (name,) = merge(tmp_path, tmp_path)
    assert verify(tmp_path).ok
    store = open_store(tmp_path)
    assert [shard.name for shard in store.shards] == [name]
    assert headers(tmp_path) == [wide(widths={WIDE: 12, other: 5})]
    for nth, taps in enumerate(([STREAM], BOTH, [other, STREAM])):
        for place, tap in enumerate(taps):
            assert same(store.get(str(nth))[tap], vectors(nth + place, 3, head, tap))


@pytest.mark.parametrize("width", [HIDDEN, 16])
def test_shards_with_a_tap_in_two_widths_are_not_merged_into_one(tmp_path, width):
    for request, head in (("a", wide()), ("b", wide(widths={WIDE: width}))):
        write(tmp_path, [entry(request, taps=BOTH, head=head)], head)
    assert merge(tmp_path, tmp_path) == []
    assert [each.width(WIDE) for each in headers(tmp_path)] == [12, width]


def test_a_shard_that_loses_its_wide_rows_loses_their_widths(tmp_path):
    head = wide()
    rows = [entry("a", taps=BOTH, head=head, tag="x"), entry("b", taps=[STREAM], head=head)]
    write(tmp_path, rows, head)
    prune(tmp_path, tags=["x"])
    assert headers(tmp_path) == [header()]
    (path,) = tmp_path.glob("*.safetensors")
    data = path.read_bytes()
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][
        "version"
    ] == "1"  # fmt: skip
