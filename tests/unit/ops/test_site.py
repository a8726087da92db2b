"""The `site` op on the CPU: the reference implementation against its own definition."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.site_cases import Step, assert_same, case, in_units, random_case, same_bits
from support.site_oracle import expected

import midstream.ops.site
from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.site import bind, site

ADD = [Step(Op.ADD, write=1, a=0.7)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_are_carried_out_captured_and_counted_as_defined(dtype):
    for width in (1, 80, 640):
        for residual in (True, False):
            for max_steps in (0, 1, 8):
                made = random_case(rows=13, width=width, dtype=dtype, residual=residual,
                                   max_steps=max_steps, seed=width)  # fmt: skip
                wanted = expected(made)
                made.run()
                assert_same(made, wanted, exact=max_steps == 0)


@settings(max_examples=rounds(suite=75, nightly=600))
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 9),
    programs=st.integers(1, 4),
    residual=st.booleans(),
    captures=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_mix_of_programs_is_carried_out_as_defined(
    seed, rows, programs, residual, captures, dtype
):
    made = random_case(
        rows=rows, width=24, dtype=dtype, residual=residual, captures=captures, max_steps=6,
        seed=seed, programs=programs,
    )  # fmt: skip
    wanted = expected(made)
    made.run()
    assert_same(made, wanted, exact=False)


def test_a_later_edit_reads_what_the_edits_before_it_left():
    for op in (Op.MULTIPLY, Op.SCALE, Op.REPLACE, Op.LINEAR):
        after = Step(op, a=0.5, flags=Flags.FRESH | Flags.COUNTED)
        made = case([[Step(Op.ADD, a=2.0, flags=Flags.COUNTED), after]], rows=4, width=12)
        wanted = expected(made)
        made.run()
        assert_same(made, wanted, exact=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_and_what_comes_after_them_are_carried_out_as_defined(dtype):
    for seed in range(8):
        made = random_case(rows=19, width=40, dtype=dtype, residual=seed % 2 == 0, max_steps=3,
                           seed=seed, maps=2)  # fmt: skip
        units = 1 if seed < 4 else 5
        wanted, found = in_units(expected(made), units), in_units(made, units)
        found.run()
        assert_same(found, wanted, exact=False)


@pytest.mark.parametrize("units", [2, 5])
def test_vectors_of_several_units_are_used_and_captured_as_those_of_one(units):
    for seed in range(16):
        made = random_case(rows=9, width=10 * units, max_steps=5, seed=seed, dtype=torch.float32,
                           residual=seed % 2 == 0, captures=seed // 2 % 2 == 0)  # fmt: skip
        wanted, found = made.copy(), in_units(made, units)
        wanted.run()
        found.run()
        assert_same(found, in_units(wanted, units), exact=True)


def test_a_width_that_is_no_multiple_of_the_unit_is_refused():
    made = in_units(random_case(rows=2, width=8, dtype=torch.float32, residual=False,
                                max_steps=1, seed=0), 2)  # fmt: skip
    with pytest.raises(ValueError, match="width must be a multiple of 4"):
        bind(made.table, made, 6)
    bind(made.table, made, 4)
    with pytest.raises(ValueError, match="hidden must be 4 wide at this site"):
        torch.ops.midstream.site(made.hidden, None, made.table, made.tally)


def test_additions_are_exact_whether_rows_have_one_program_or_several():
    steps = [[Step(Op.ADD, write=row, a=0.3 * row) for row in range(n)] for n in (3, 2)]
    for dtype in (torch.float32, torch.bfloat16):
        for programs in (1, 2):
            made = case(steps[:programs], rows=7, width=40, dtype=dtype, captures=False)
            wanted = expected(made)
            made.run()
            assert_same(made, wanted, exact=True)


@pytest.mark.parametrize("residual", [True, False])
def test_captured_rows_are_exact_wherever_they_go(residual):
    rows = 6
    for places in (1, 3):
        for skipped in ([], [2], [0, 1, 4]):
            for ring in (torch.float32, torch.bfloat16):
                made = case([[]], rows=rows, width=40, dtype=torch.bfloat16, residual=residual,
                            captures=False)  # fmt: skip
                made.ring = made.ring.to(ring)
                made.table[2, layout.PLACE] = places
                made.tokens[:rows, layout.GROUP] = 2
                made.tokens[:rows, layout.RECORD] = 1 + places * torch.arange(rows).int().flip(0)
                made.tokens[skipped, layout.RECORD] = 0
                wanted = expected(made)
                made.run()
                assert_same(made, wanted, exact=True)
                assert int((made.tally - wanted.tally).abs().sum()) == 0


def test_an_idle_batch_is_left_exactly_as_it_was():
    made = random_case(rows=9, width=64, dtype=torch.bfloat16, residual=True, max_steps=3, seed=1)
    made.tokens[:, layout.PROGRAM] = 0
    before = made.copy()
    made.run()
    assert_same(made, before, exact=True)
    case([ADD], rows=0, width=32).run()


def test_rows_of_padding_beyond_the_words_in_use_are_not_touched():
    made = case([ADD], rows=6, width=32, captures=False)
    made.tokens[3:] = 0
    before = made.copy()
    made.run()
    assert torch.equal(made.hidden[3:], before.hidden[3:])
    assert torch.equal(made.tally[3:], before.tally[3:])
    assert not torch.equal(made.hidden[:3], before.hidden[:3])


def test_buffers_of_wrong_shapes_strides_and_dtypes_are_not_bound():
    for change, message in (
        ({"tally": torch.zeros(20, 3, dtype=torch.int32)}, "tally must be"),
        ({"tally": torch.zeros(5, 4, dtype=torch.int32)}, "tally must be"),
        ({"ids": torch.zeros(5, 2, dtype=torch.int32)}, "ids must be"),
        ({"ids": torch.zeros(6, dtype=torch.int32)}, "ids must be"),
        ({"ids": torch.zeros(6, 2)}, "ids must be contiguous torch.int32"),
        ({"scores": torch.zeros(5, 3)}, "scores must be"),
        ({"tokens": torch.ones(6, 4, dtype=torch.int64)}, "tokens must be"),
        ({"table": torch.zeros(20, 5, dtype=torch.int32)}, "table must be"),
        ({"instructions": torch.zeros(20, 7, dtype=torch.int32)}, "instructions must be"),
        ({"params": torch.zeros(20, 4)}, "params must be"),
        ({"lists": torch.zeros(4)}, "lists must be"),
        ({"bank": torch.zeros(4, 32, dtype=torch.float64)}, "bank must be"),
        ({"ring": torch.zeros(4, 64)[:, ::2]}, "ring must be contiguous"),
        ({"ring": torch.zeros(4, 33)}, "ring must be"),
    ):
        made = case([ADD], rows=6, width=32, captures=False)
        for name, value in change.items():
            setattr(made, name, value)
        with pytest.raises(ValueError, match=message):
            made.bound()


def test_rows_that_do_not_fit_their_buffers_are_refused():
    for change, message in (
        ({"residual": torch.zeros(5, 32)}, "residual must match hidden"),
        ({"residual": torch.zeros(6, 64)[:, ::2]}, "residual must match hidden"),
        ({"hidden": torch.zeros(6, 64)[:, ::2]}, "hidden must be"),
        ({"hidden": torch.zeros(60, 32), "residual": None}, "hidden must have at most"),
        ({"hidden": torch.zeros(6, 33), "residual": None}, "width must be a multiple of 32"),
        ({"hidden": torch.zeros(6, 32, dtype=torch.int32)}, "must be float32, bfloat16 or"),
    ):
        made = case([ADD], rows=6, width=32, captures=False)
        for name, value in change.items():
            setattr(made, name, value)
        before = made.hidden.clone()
        with pytest.raises(ValueError, match=message):
            site(*made.bound())
        assert same_bits(made.hidden.contiguous(), before.contiguous()), change


def test_the_tally_of_other_buffers_is_refused():
    made = case([ADD], rows=6, width=32, captures=False)
    hidden, residual, table, tally = made.bound()
    for other in (tally[1:], tally.long()):
        with pytest.raises(ValueError, match="tally must be that of the buffers"):
            site(hidden, residual, table, other)


def test_a_table_uses_the_buffers_that_it_was_bound_to_last():
    first, second = (case([ADD], rows=3, width=16, captures=False, seed=n) for n in (1, 2))
    first.bound()
    first.relaunches[first.table.data_ptr()]["kind"] = "a kernel for the first buffers"
    second.table = first.table
    wanted = expected(second)
    second.run()
    assert_same(second, wanted, exact=False)
    assert second.relaunches[first.table.data_ptr()] == {}


def test_a_table_whose_buffers_are_gone_is_refused():
    made = case([ADD], rows=3, width=16, captures=False)
    arguments = made.bound()
    site(*arguments)
    del made
    with pytest.raises(ValueError, match="not bound to buffers, or these are gone"):
        site(*arguments)


@pytest.mark.engine
def test_the_op_survives_compilation_in_order_and_in_place():
    made = case([[*ADD, Step(Op.CLIP, read=2, write=2, a=-0.1, b=0.1, c=0.03)]], rows=8, width=32)
    made.tokens[:, layout.PROGRAM] = 2
    wanted = expected(made)
    doubled = expected(wanted)

    def model(hidden, *rest):
        torch.ops.midstream.site(hidden, *rest)
        between = hidden * 2
        torch.ops.midstream.site(hidden, *rest)
        return between, hidden * 3

    between, after = torch.compile(model, fullgraph=True)(*made.bound())
    torch.testing.assert_close(between, wanted.hidden * 2)
    torch.testing.assert_close(after, doubled.hidden * 3)
    assert_same(made, doubled, exact=False)


def test_the_op_is_defined_as_its_schema_says(monkeypatch):
    made = random_case(rows=4, width=16, dtype=torch.float32, residual=True, max_steps=2, seed=7)
    arguments = made.bound()
    # `opcheck` calls the op with copies of its arguments.
    always = SimpleNamespace(get=lambda _address: made)
    monkeypatch.setattr(midstream.ops.site, "_BUFFERS", always)
    monkeypatch.setattr(made, "widths", defaultdict(lambda: 16), raising=False)
    torch.library.opcheck(
        torch.ops.midstream.site.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    assert midstream.ops.site.site.__doc__
