"""What holds for each codec alike."""

import pickle

import pytest
import torch
from support.codec_rows import CODECS, DTYPES, LOSSY, codec

from midstream.codecs import parse_codec
from midstream.errors import CodecError

HIDDEN = 37


@pytest.mark.parametrize("spec", CODECS)
def test_rows_have_the_width_that_is_told_and_decode(spec):
    for dtype in DTYPES.values():
        for n in (0, 1, 2, 33):
            data = codec(spec).encode(torch.randn(n, HIDDEN, dtype=dtype))
            assert data.dtype == torch.uint8
            assert data.shape == (n, codec(spec).row_bytes(HIDDEN, dtype))
            codec(spec).check(data, HIDDEN, dtype)
            found = codec(spec).decode(data, HIDDEN, dtype)
            assert found.shape == (n, 16 if spec.startswith("rp8") else HIDDEN)
            assert found.dtype == (dtype if spec == "raw" else torch.float32)


@pytest.mark.parametrize("spec", CODECS)
def test_encoding_waits_for_no_device_and_its_shapes_depend_on_no_values(spec):
    for dtype in DTYPES.values():
        # A meta tensor has no values: whatever asks for one fails.
        data = codec(spec).encode(torch.empty(5, HIDDEN, dtype=dtype, device="meta"))
        assert data.device.type == "meta"
        assert data.shape == (5, codec(spec).row_bytes(HIDDEN, dtype))


@pytest.mark.parametrize("spec", CODECS)
def test_every_width_of_vectors_comes_back(spec):
    found = codec(spec.replace("k=3", "k=1"))
    for hidden in (1, 2, 3, 65536, 65537):
        rows = torch.full((2, hidden), 3.0)
        decoded = found.decode(found.encode(rows), hidden, torch.float32)
        if "topk8" in spec:
            assert decoded[:, 0].tolist() == [3, 3]  # of equals the first
        elif "rp8" not in spec:
            assert torch.equal(decoded, rows)


@pytest.mark.parametrize("spec", CODECS)
def test_rows_may_lie_anywhere_in_memory(spec):
    wide = torch.randn(8, 2 * HIDDEN + 1).bfloat16()
    parts = [wide[:, 1::2], wide[::3, :HIDDEN], wide[1:2, 2 : HIDDEN + 2], wide.T[:HIDDEN, :5]]
    cases = [(codec(spec), rows) for rows in (*parts, wide[3:3, :HIDDEN])]
    # torch calls a single number contiguous whatever its stride is.
    for dtype in DTYPES.values():
        few = torch.arange(1, 9, dtype=dtype).view(2, 4)
        numbers = (few[:1, 1::3][:, :1], few.T[3:, ::2][:, :1], few[:1, :1].expand(1, 1))
        cases += [(codec(spec.replace("k=3", "k=1")), rows) for rows in numbers]
    for found, rows in cases:
        together = rows.clone(memory_format=torch.contiguous_format)
        assert torch.equal(found.encode(rows), found.encode(together))


@pytest.mark.parametrize("spec", CODECS)
def test_encoded_rows_may_lie_anywhere_in_memory(spec):
    data = codec(spec).encode(torch.randn(4, HIDDEN))
    expected = codec(spec).decode(data, HIDDEN, torch.float32)
    for shift in (0, 1, 2, 3, 4, 7):
        wide = torch.zeros(4, data.shape[1] + 8, dtype=torch.uint8)
        wide[:, shift : shift + data.shape[1]] = data
        flat = torch.cat([torch.zeros(shift, dtype=torch.uint8), data.reshape(-1)])
        for moved in (wide[:, shift : shift + data.shape[1]], flat[shift:].view_as(data)):
            for part in (slice(None), slice(2, 3), slice(0, 0)):
                found = codec(spec).decode(moved[part], HIDDEN, torch.float32)
                assert torch.equal(found, expected[part]), shift


@pytest.mark.parametrize("spec", CODECS)
def test_a_row_s_bytes_do_not_depend_on_what_else_is_encoded(spec):
    rows = torch.randint(-8, 8, (9, HIDDEN)).float()  # whose products are exact, for rp8
    rows[3] *= 1e30
    rows[5, 2] = torch.nan
    whole = codec(spec).encode(rows)
    if spec.startswith("rp8"):  # but for the order in which a product adds up
        whole = codec(spec).decode(whole, HIDDEN, torch.float32)
        each = [
            codec(spec).decode(codec(spec).encode(row[None]), HIDDEN, row.dtype) for row in rows
        ]
        steps = whole.amax(1, keepdim=True) - whole.amin(1, keepdim=True)
        difference = (torch.cat(each) - whole).abs() / steps
        assert difference.nan_to_num(0).max() < 1.01 / 255
        return
    each = [codec(spec).encode(row[None]) for row in rows]
    assert torch.equal(torch.cat(each), whole)


@pytest.mark.parametrize("spec", LOSSY)
def test_a_row_that_is_not_finite_reads_nan_throughout_and_no_other_row_does(spec):
    for dtype in DTYPES.values():
        for bad in (torch.nan, torch.inf, -torch.inf):
            rows = torch.randn(5, HIDDEN, dtype=dtype)
            rows[1, 0] = bad
            rows[3, 5:9] = torch.tensor([torch.inf, -torch.inf, torch.nan, bad])
            data = codec(spec).encode(rows)
            codec(spec).check(data, HIDDEN, dtype)
            marks = [bytes(data[row, :8].tolist()).hex() for row in (1, 3)]
            assert marks == ["000000000000c07f"] * 2
            found = codec(spec).decode(data, HIDDEN, dtype)
            assert found[[1, 3]].isnan().all()
            assert found[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("spec", CODECS)
def test_torch_s_default_dtype_changes_nothing(spec):
    rows = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    rows[1], rows[1, 4], rows[2, 0] = 3e38, -3e38, torch.nan
    found = codec(spec)
    data = found.encode(rows)
    decoded = found.decode(data, HIDDEN, rows.dtype)
    before = torch.get_default_dtype()
    for default in DTYPES.values():
        torch.set_default_dtype(default)
        try:
            again = found.encode(rows)
            decoded_again = found.decode(data, HIDDEN, rows.dtype)
        finally:
            torch.set_default_dtype(before)
        assert torch.equal(again, data)
        assert torch.equal(decoded_again.nan_to_num(7), decoded.nan_to_num(7))
        assert decoded_again.dtype == decoded.dtype


@pytest.mark.parametrize("spec", CODECS)
def test_rows_with_a_gradient_are_encoded_without_it_and_all_stays_as_it_was(spec):
    rows = torch.randn(3, HIDDEN, requires_grad=True)
    before = rows.detach().clone()
    data = codec(spec).encode(rows * 1)
    encoded = data.clone()
    assert not data.requires_grad
    codec(spec).decode(data, HIDDEN, torch.float32)
    assert torch.equal(rows, before)
    assert torch.equal(data, encoded)


@pytest.mark.parametrize("spec", CODECS)
def test_rows_that_no_model_makes_are_refused(spec):
    with pytest.raises(CodecError, match="expected one of float32, bfloat16, float16, got float64"):
        codec(spec).encode(torch.zeros(2, 4, dtype=torch.float64))
    for shape in ([4], [2, 0], [2, 3, 4]):
        with pytest.raises(CodecError, match=r"expected \[n, hidden\], got \["):
            codec(spec).encode(torch.zeros(shape))


@pytest.mark.parametrize("spec", CODECS)
def test_bytes_of_another_width_or_dtype_are_refused(spec):
    found = codec(spec)
    data = found.encode(torch.randn(2, HIDDEN))
    for method in (found.check, found.decode):
        for wrong in (data[:, :-1], torch.cat([data, data[:, :1]], dim=1)):
            with pytest.raises(CodecError, match=rf"expected {data.shape[1]} bytes per row"):
                method(wrong, HIDDEN, torch.float32)
        for wrong in (data.float(), data[0], data.view(torch.int8)):
            with pytest.raises(CodecError, match=r"expected uint8 \[n, row_bytes\], got"):
                method(wrong, HIDDEN, torch.float32)


@pytest.mark.parametrize("spec", CODECS)
def test_codecs_are_values(spec):
    found = codec(spec)
    assert parse_codec(found) is found
    assert found == parse_codec(found.spec) == pickle.loads(pickle.dumps(found))
    assert hash(found) == hash(parse_codec(found.spec))
    assert len({codec(other) for other in (*CODECS, *CODECS)}) == len(CODECS)
