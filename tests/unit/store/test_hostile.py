"""Files that are no shards, or not any more: refused by name, at once, without being believed."""

import contextlib
import json
import os
import pickle
import resource
import struct
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from unit.store.crafting import head_of, put_together, replaced, seal, take_apart
from unit.store.making import entry, header, rows_of, shard_bytes, vectors

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import Entry, verify
from midstream.store.backends.local import LocalFolder
from midstream.store.format.checked_file import CheckedFile
from midstream.store.format.layout import Layout, padding, read_head

NAME = "shard.safetensors"


SECOND_ROWS = rows_of(vectors(9, 2, header()), header(), [0, 4])
GOOD = shard_bytes(
    [
        entry("a", metadata={"x": 1}),
        Entry(request="b", prompt_tokens=1, tag="t", taps={("mlp_out", 2): SECOND_ROWS}),
    ]
)
START = 8 + int.from_bytes(GOOD[:8], "little")


def everything(root):
    """All that can be read of a store, as plain values."""
    store = open_store(root)
    found = []
    for each in store.requests:
        found.append((each.request, each.child, each.tag, each.prompt_tokens, each.metadata))
        for tap, values in each.activations().items():
            where = each.activations().positions_of(*tap).tolist()
            tokens = each.activations().token_ids_of(*tap).tolist()
            found.append((tap, values.view(torch.uint8).tolist(), where, tokens))
    for batch in store.select(position=slice(0, 99)).batches(3):
        found.append((batch.encoded.tolist(), batch.request, batch.position.tolist()))
        found.append(batch.token_id.tolist())
    return found


def refused(root, data, problem):
    """Sees to it that reading, and verifying, refuse a shard by name; returns the message."""
    (root / NAME).write_bytes(data)
    with pytest.raises(StoreError, match=problem) as caught:
        everything(root)
    assert str(caught.value).startswith(f"{root / NAME}: ")
    (finding,) = verify(root).findings
    assert finding.shard == NAME
    assert str(caught.value).endswith(finding.problem)
    return finding.problem


def changed(change):
    """The good shard after something was done to its header, with checksums that fit."""
    described, parts = take_apart(GOOD)
    change(described)
    return put_together(described, parts)


def test_the_good_shard_is_good(tmp_path):
    described, parts = take_apart(GOOD)
    assert put_together(described, parts) == GOOD
    (tmp_path / NAME).write_bytes(GOOD)
    assert verify(tmp_path).ok
    assert len(everything(tmp_path)) > 8


def test_a_shard_that_is_too_short_too_long_or_stands_for_itself_is_refused(tmp_path):
    for length in (0, 1, 7, 8, 9, START - 1, START, START + 1, len(GOOD) - 1):
        refused(tmp_path, GOOD[:length], "truncated: ")
    refused(tmp_path, GOOD + b"\0", f"too long: expected {len(GOOD)} bytes .*, got {len(GOOD) + 1}")
    refused(tmp_path, changed(about(replaces=NAME)), "the shard lists itself")


@pytest.mark.parametrize("length", [0, 1, (4 << 20) + 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_of_an_impossible_length_is_refused(tmp_path, length):
    with (tmp_path / NAME).open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(1 << 33)  # a hole: it takes no room
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match="truncated|header of .* bytes; the limit is"):
        open_store(tmp_path).shards  # noqa: B018
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"\xff\xfe", "the header is not JSON"),
        (b"{", "the header is not JSON"),
        (b"[]", "the header is not a JSON object"),
        (b"{}", "a safetensors file, but not a shard of a midstream store"),
        (b'{"a":1,"a":2}', "duplicate JSON field 'a'"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"__metadata__":' * 50_000, "nested too deeply"),
        (
            b'{"__metadata__":{"format":"midstream.store","version":1e999}}',
            "unsupported format version 'inf'",
        ),
        (b'{"__metadata__":' + b"9" * 5000 + b"}", "the header is not JSON|not a shard"),
        (b'{"__metadata__":{"format":["midstream.store"]}}', "not a shard"),
    ],
    ids=range(10),
)
def test_a_header_that_is_not_ours_is_refused(tmp_path, text, problem):
    refused(tmp_path, seal(head_of(text), b""), problem)


def test_a_pickle_is_not_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    refused(tmp_path, pickle.dumps(Bomb()), "truncated|header of")


def about(**fields):
    return lambda described: described["__metadata__"].update(fields)


def tensor(name, **fields):
    return lambda described: described[name].update(fields)


def renamed(old, new):
    def change(described):
        for name in list(described):
            described[new if name == old else name] = described.pop(name)

    return change


def everywhere(**shapes):
    """Other shapes for all tensors of group 1, and offsets that fit nothing."""

    def change(described):
        for name, fields in described.items():
            if name.startswith("g1."):
                fields["shape"][0] = shapes["rows"]

    return change


HEADERS = {
    "another format": (about(format="else"), "not a shard of a midstream store"),
    "a later version": (about(version="3"), "unsupported format version '3'; expected 1 or 2"),
    "another checksum": (about(checksum="md5"), "checksum: expected crc32:65536, got 'md5'"),
    "no model": (lambda d: d["__metadata__"].pop("model"), "model: expected `str`, got `None`"),
    "a key more": (about(more="x"), "not in canonical form"),
    "a hidden size that is no number": (about(hidden_size="8x"), "hidden_size: expected a number"),
    "a hidden size beyond all": (about(hidden_size="9" * 5000), "hidden_size: expected a number"),
    "a large hidden size": (about(hidden_size="999999999"), "hidden_size: expected 1 to 1048576"),
    "another hidden size": (about(hidden_size="16"), "tensor 'g0.resid_pre.0': expected"),
    "an unknown dtype": (about(dtype="float8"), "dtype: expected one of"),
    "an unknown codec": (about(codec="zip"), "codec: expected one of"),
    "a codec that is not written out": (about(codec="rp8"), "codec: expected the full spec"),
    "a codec too wide": (about(codec="topk8:k=9"), "codec.k: expected at most 8"),
    "a codec of huge rows": (about(codec="rp8:k=99999999999,seed=0"), "codec.k: expected"),
    "a path as a source": (about(replaces="../x.safetensors"), "is not a shard name"),
    "two spaces between sources": (
        about(replaces="a.safetensors  b.safetensors"),
        "is not a shard name",
    ),
    "a list of sources": (about(replaces=["a.safetensors"]), "not in canonical form"),
    "half a surrogate pair": (about(model="\ud800"), "not JSON|surrogate"),
    "an unknown site": (renamed("g1.mlp_out.2", "g1.mlp_oat.2"), "unknown site or layer"),
    "a layer beyond all": (renamed("g1.mlp_out.2", "g1.mlp_out.99999"), "unknown site or layer"),
    "a layer with a zero before": (renamed("g1.mlp_out.2", "g1.mlp_out.02"), "no taps or no index"),
    "a group left out": (renamed("g1.request", "g3.request"), "not numbered from 0"),
    "an unknown tensor": (renamed("metadata", "metadatum"), "missing tensor 'metadata'"),
    "a tensor more": (
        lambda d: d.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        "tensor 'extra' is not part of the format",
    ),
    "no checksums": (lambda d: d.pop("checksums"), "tensor 'checksums': expected .* got nothing"),
    "a dtype that does not fit": (tensor("g0.position", dtype="F64"), "tensor 'g0.position': exp"),
    "an unknown dtype of a tensor": (tensor("g0.position", dtype=[]), "tensor 'g0.position': exp"),
    "a shape of two": (tensor("g0.request", shape=[3, 1]), "'g0.request': expected one dimension"),
    "a shape that is no list": (tensor("g0.request", shape=3), "expected one dimension, got '3'"),
    "no shape": (lambda d: d["g0.request"].pop("shape"), "expected one dimension, got nothing"),
    "a negative shape": (everywhere(rows=-2), "-2 rows; expected 0 to"),
    "a shape that overflows": (everywhere(rows=2**62), "4611686018427387904 rows; expected 0 to"),
    "a shape of many digits": (
        everywhere(rows=10**400),
        "an integer of .* bits rows; expected 0 to",
    ),
    "a shape that is a float": (everywhere(rows=2.0), "expected one dimension, got .*2.0"),
    "rows that nobody wrote": (everywhere(rows=2**39), "tensor 'g0.token_id': expected|'g1.pos"),
    "a float as an offset": (
        tensor("g0.position", data_offsets=[0.0, 24]),
        "not in canonical form",
    ),
    "offsets that overlap": (
        tensor("g1.position", data_offsets=[0, 16]),
        "'g1.position': expected",
    ),
    "offsets with a gap": (tensor("requests", data_offsets=[900, 1000]), "'requests': expected"),
    "offsets beyond the file": (
        tensor("checksums", data_offsets=[2**40, 2**40 + 12]),
        "tensor 'checksums': expected",
    ),
    "a tensor that is a list": (lambda d: d.update({"g0.request": []}), "expected one dimension"),
}


def test_a_header_in_another_order_or_with_spaces_is_refused(tmp_path):
    described, parts = take_apart(GOOD)
    described["requests"] = described.pop("requests")
    refused(tmp_path, put_together(described, parts), "not in canonical form|tensor")
    text = GOOD[8:START].replace(b'"format":', b'"format": ', 1)
    refused(tmp_path, seal(head_of(text.rstrip()), GOOD[START:-12]), "not in canonical form")


LINE = json.loads(take_apart(GOOD)[1]["requests"].split(b"\n")[0])


def with_line(**fields):
    """The good shard with another first line, all lengths as they must be then."""
    described, parts = take_apart(GOOD)
    line = json.dumps(LINE | fields, separators=(",", ":")).encode()
    return with_requests(line + b"\n" + parts["requests"].split(b"\n", 1)[1])


def with_requests(text, data=GOOD):
    layout = read_head(data[: 8 + int.from_bytes(data[:8], "little")], len(data))
    _, parts = take_apart(data)
    metadata = parts["metadata"].rstrip(b" ")
    rows = sum(len(part) for name, part in parts.items() if name.startswith("g"))
    filled = metadata + b" " * padding(rows + len(text) + len(metadata))
    other = Layout(layout.header, layout.groups, len(text), len(filled))
    parts |= {"requests": text, "metadata": filled}
    return seal(other.head(), b"".join(parts.values()))


LINES = {
    "no rows": (with_line(rows=[]), "group 0: 3 rows, but the requests list 0"),
    "too few rows": (with_line(rows=[[0, 2]]), "group 0: 3 rows, but the requests list 2"),
    "too many rows": (with_line(rows=[[0, 2**40]]), "group 0: 3 rows, but the requests list 10995"),
    "rows of no group": (with_line(rows=[[0, 3], [2, 0]]), "there is no group 2"),
    "groups out of order": (with_line(rows=[[1, 0], [0, 3]]), "rows: group: expected 2 to"),
    "rows that are no pairs": (with_line(rows=[0, 3]), "expected a list of .group, rows."),
    "rows of floats": (with_line(rows=[[0, 3.0]]), "rows: expected `int`, got `float`"),
    "an id twice": (with_line(id="b"), "request 'b': listed twice"),
    "no id": (with_line(id=""), "id: expected 1 to 1024 characters"),
    "a negative child": (with_line(child=-1), "child: expected 0 to"),
    "a field more": (with_line(more=1), "unknown field 'more'"),
    "metadata of another length": (with_line(metadata=9), "metadata: expected JSON"),
    "metadata beyond the end": (with_line(metadata=5000), "metadata: .* bytes, but the requests"),
    "metadata that is too large": (with_line(metadata=2**60), "metadata: expected 3 to"),
    "a line that is no JSON": (with_requests(b"{\n"), "a request's line: expected JSON"),
    "a line that is not UTF-8": (with_requests(b"\xff\n"), "a request's line: expected JSON"),
    "a line without an end": (with_requests(b"{}"), "the last line has no newline"),
    "a line of brackets": (with_requests(b"[" * 90_000 + b"\n"), "nested too deeply"),
    "a line that is too long": (with_requests(b" " * (2 << 20) + b"\n"), "a request's line of"),
    "no lines": (with_requests(b""), "group 0: 3 rows, but the requests list 0"),
}


def test_positions_that_do_not_ascend_are_refused(tmp_path):
    for positions in ((0, 2, 1), (0, 0, 1), (-1, 0, 1), (0, 1, 2**62)):
        data = replaced(GOOD, g0__position=struct.pack("<3q", *positions))
        refused(tmp_path, data, "expected ascending positions")


def test_metadata_that_are_not_json_and_too_many_lines_are_refused(tmp_path):
    text = take_apart(GOOD)[1]["metadata"].replace(b'"x":1', b'"x":NN'[:5])
    refused(tmp_path, replaced(GOOD, metadata=text), "metadata: expected JSON")
    refused(tmp_path, with_requests(b"{}\n" * 6_000_000), "requests: 18000000 bytes; the limit is")


def test_rows_that_are_said_to_be_anothers_are_found_by_verify(tmp_path):
    (tmp_path / NAME).write_bytes(replaced(GOOD, g0__request=struct.pack("<3i", 0, 7, 0)))
    (finding,) = verify(tmp_path).findings
    assert finding.problem == "group 0: column `request` differs from the list of requests"


def test_a_tap_in_two_groups_of_a_request_is_refused(tmp_path):
    both = [("resid_post", 0), ("resid_post", 1)]
    data = shard_bytes([entry("a", taps=both[:1]), entry("b", taps=both)])
    text = take_apart(data)[1]["requests"]
    text = text.replace(b"[[0,3]]", b"[[0,3],[1,3]]", 1).replace(b'"rows":[[1,3]]', b'"rows":[]')
    refused(tmp_path, with_requests(text, data), "request 'a': a tap has rows in two groups")


@pytest.mark.parametrize("codec", ["full8", "rp8:k=64,seed=0", "topk8:k=4"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_scales_that_no_codec_writes_are_refused(tmp_path, codec, scale):
    head = header(codec=codec)
    data = shard_bytes([entry("a", head=head)], head)
    rows = bytearray(take_apart(data)[1]["g0.resid_post.3"])
    width = len(rows) // 3
    rows[width : width + 4] = struct.pack("<f", scale)
    problem = "the scale is (negative|not a finite number)"
    (tmp_path / NAME).write_bytes(replaced(data, **{"g0__resid_post__3": bytes(rows)}))
    with pytest.raises(StoreError, match=f"{NAME}: .*{problem}"):
        everything(tmp_path)
    with pytest.raises(StoreError, match=f"{NAME}: .*{problem}"):
        _ = next(open_store(tmp_path).select(layer=3).batches(9)).values
    (finding,) = verify(tmp_path).findings
    assert finding.problem.startswith("resid_post of layer 3, rows from 0: ")


def test_two_shards_that_stand_for_one_are_found_by_verify(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(shard_bytes([entry(name)], replaces=["old.safetensors"]))
    assert verify(tmp_path).ok, "what both stand for is gone"
    (tmp_path / "old.safetensors").write_bytes(GOOD)
    (finding,) = verify(tmp_path).findings
    assert finding.shard == "b.safetensors"
    assert finding.problem == "it replaces old.safetensors, and so does a.safetensors"


def test_a_row_that_a_tensor_does_not_have_gets_no_address(tmp_path):
    (tmp_path / NAME).write_bytes(GOOD)
    file = CheckedFile(LocalFolder(str(tmp_path)), NAME)
    name, place = next(
        (name, place) for name, place in file.places.items() if len(place.shape) == 2
    )
    last = place.shape[0] - 1
    assert file.locate_rows([name], [np.array([0, last])])[1].shape == (2, 1)
    for row in (-1, last + 1):
        with pytest.raises(StoreError, match=f"damaged: {name} has {last + 1} rows"):
            file.locate_rows([name], [np.array([0, row])])


def test_what_is_no_file_is_refused_at_once(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    os.mkfifo(tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").symlink_to(tmp_path / "nowhere")
    problems = [finding.problem for finding in verify(tmp_path).findings]
    assert [problem.removeprefix(f"{tmp_path}/") for problem in problems] == [
        "not a regular file",
        "not a regular file",
        "No such file or directory",
    ]


@settings(max_examples=rounds(suite=60, nightly=20_000))
@given(bit=st.integers(0, 8 * len(GOOD) - 1))
@example(bit=8 * (len(GOOD) - 1))
@example(bit=8 * (len(GOOD) - 12))
@example(bit=8 * (START + 100))  # in the rows of the first tap
def test_a_flipped_bit_is_refused_by_name(tmp_path_factory, bit):
    root = tmp_path_factory.mktemp("flipped")
    data = bytearray(GOOD)
    data[bit // 8] ^= 1 << bit % 8
    (root / NAME).write_bytes(data)
    assert not verify(root).ok
    with pytest.raises(StoreError, match=NAME):
        everything(root)


@settings(max_examples=rounds(suite=60, nightly=20_000))
@given(data=st.data())
def test_damage_of_any_kind_is_refused_or_reads_as_before(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("damaged")
    found = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(found) - 1)))
        kind = data.draw(st.sampled_from(["cut", "put", "drop", "insert", "swap"]))
        piece = data.draw(st.binary(min_size=1, max_size=16))
        if kind == "cut":
            del found[at:]
        elif kind == "put":
            found[at : at + len(piece)] = piece
        elif kind == "drop":
            del found[at : at + len(piece)]
        elif kind == "insert":
            found[at:at] = piece
        else:
            found[at : at + 8], found[at + 8 : at + 16] = (
                found[at + 8 : at + 16],
                found[at : at + 8],
            )
    (root / NAME).write_bytes(found)
    if bytes(found) == GOOD:
        return
    assert not verify(root).ok
    with pytest.raises(StoreError, match=NAME):
        everything(root)


@settings(max_examples=rounds(suite=60, nightly=20_000))
@given(data=st.data())
def test_a_forged_shard_is_read_or_refused_but_never_anything_else(tmp_path_factory, data):
    """Checksums that fit prove nothing: what is under them may be anything."""
    root = tmp_path_factory.mktemp("forged")
    described, parts = take_apart(GOOD)
    name = data.draw(st.sampled_from([*parts, ""]))
    if name:
        part = bytearray(parts[name])
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, max(0, len(part) - 1)))
            piece = data.draw(st.binary(min_size=1, max_size=8))
            part[at : at + len(piece)] = piece[: len(part) - at]
        parts[name] = bytes(part)
        forged = put_together(described, parts)
    else:
        text = bytearray(GOOD[8:START])
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(text) - 1))
            text[at : at + 1] = data.draw(st.sampled_from(b'0123456789",:[]{}-.eE')).to_bytes(
                1, "big"
            )
        forged = seal(struct.pack("<Q", len(text)) + bytes(text), GOOD[START:-12])
    (root / NAME).write_bytes(forged)
    verify(root)
    with contextlib.suppress(StoreError):
        everything(root)


def test_headers_and_requests_that_cannot_be_are_refused_in_no_time_and_no_memory(tmp_path):
    cases = [(changed(change), problem) for change, problem in HEADERS.values()]
    tracemalloc.start()
    started = time.process_time()
    for data, problem in (*cases, *LINES.values()):
        refused(tmp_path, data, problem)
    took = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 20
    assert peak < 64 << 20
