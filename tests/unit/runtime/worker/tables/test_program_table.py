"""The tables of programs: what they say to the device, what is shared, and what finds no room."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_steps import make_buffers
from support.nightly import rounds
from support.plans import KINDS, VECTORS, add, edits_of, gated, mapped, rows
from support.programs import assert_free, assert_program, programs

from midstream.errors import NoRoomError, SpecError
from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.plan import Instruction, Vector
from midstream.runtime.protocol.segments import TapProgramStep
from midstream.runtime.worker.tables import instruction_store
from midstream.runtime.worker.tables.program_table import ProgramTable

NUM_TAPS = 6


# ---------------------------------------------------------------- what the device reads


@settings(max_examples=rounds(suite=75, nightly=600))
@given(programs(NUM_TAPS))
def test_a_program_says_at_each_tap_what_its_edits_do_in_their_order(wanted):
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    index = tables.acquire_program(wanted)
    assert index >= layout.FIRST_FREE_PROGRAM
    assert_program(buffers, index, wanted)
    always = [edit for edit in wanted if not edit.by_token]
    assert tables.fewest[index] == sum(step.counted for edit in always for step in edit.steps)
    assert tables.most[index] == sum(step.counted for edit in wanted for step in edit.steps)
    assert tables.by_id[index] == (len(always) < len(wanted))
    assert tables.by_position[index] == any(
        Flags.ROW_BY_POSITION in step.flags for edit in wanted for step in edit.steps
    )
    tables.release_program(wanted)
    assert_free(tables)


def test_every_kind_of_edit_is_written():
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    wanted = edits_of(*((nth % NUM_TAPS, steps) for nth, steps in enumerate([*KINDS, rows(3, 40)])))
    rare = {Op.PROBE, Op.UNIT, Op.SCAN, Op.MAP, Op.CODE, Op.RECONSTRUCT}
    assert {step.op for edit in wanted for step in edit.steps} == set(Op) - rare
    assert_program(buffers, tables.acquire_program(wanted), wanted)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("alone", [1, 1 << 18])
def test_matrices_are_written_row_after_row_and_each_tap_says_where_its_map_is(
    mixed, alone, monkeypatch
):
    monkeypatch.setattr(instruction_store, "_ALONE", alone)
    buffers = make_buffers(maps=3, bank_rows=6, mixed=mixed)
    tables = ProgramTable(buffers)
    wide = [Vector.parse([float(n) for n in range(first, first + 16)]) for first in (0, 100)]
    narrow = Vector.parse([5.0, 6.0, 7.0, 8.0] * (1 if mixed else 4))
    wanted = edits_of(
        (3, mapped(wide[0])),
        (4, mapped(narrow, Vector.parse([1.0, 2.0] * (1 if mixed else 2)))),
        (0, gated(mapped(wide[1]), b=0.25)),
        (0, add()),
        (3, rows(2, 1)),
    )
    index = tables.acquire_program(wanted)
    assert_program(buffers, index, wanted)
    kinds = buffers.table[:, index, layout.KIND].tolist()
    assert kinds == [layout.WITH_MAP + 1, 0, 0, layout.WITH_MAP, layout.WITH_MAP, 0]
    tables.release_program(wanted)
    assert_free(tables)


def test_each_tap_says_where_its_sae_is_read():
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    code = Instruction(Op.CODE, read=Vector.parse([float(nth) for nth in range(12)]))
    made = Instruction(Op.RECONSTRUCT, a=1.0, b=1.0, flags=Flags.COUNTED)
    wanted = edits_of(
        (3, (code, made)), (0, gated((code, made), b=0.25)), (1, (code,)), (2, (made,)), (3, add())
    )
    index = tables.acquire_program(wanted)
    assert buffers.table[:, index, layout.KIND].tolist()[:4] == [-2, -1, 0, -1]
    for place, step in ((0, code), (3, code)):
        start = int(buffers.table[place, index, layout.EDIT_START]) + (place == 0)
        read = int(buffers.instructions[start, layout.READ])
        assert buffers.bank[read : read + 3].flatten().tolist() == step.read.numpy().tolist()
    tables.release_program(wanted)
    assert_free(tables)


@pytest.mark.parametrize("first", [add(), mapped(Vector.parse([1.0] * 16))])
def test_a_map_of_what_an_earlier_edit_changed_is_never_written(first):
    tables = ProgramTable(make_buffers(maps=2))
    second = mapped(Vector.parse([2.0] * 16))
    with pytest.raises(ValueError, match="MAP"):
        tables.acquire_program(edits_of((0, first), (0, second)))
    assert_free(tables)


def test_a_group_without_a_user_stays_until_another_needs_its_room():
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    del tables._free_groups[2:]
    first, second = tables.acquire_group((0, 1)), tables.acquire_group((2,))
    tables.release_group((0, 1))
    assert tables.acquire_group((0, 1)) == first
    assert tables._unused_groups == set()
    with pytest.raises(NoRoomError):
        tables.acquire_group((4,))
    tables.release_group((2,))
    assert tables.acquire_group((4,)) == second
    for index, places in ((first, [1, 2, 0, 0, 0, 0]), (second, [0, 0, 0, 0, 1, 0])):
        assert buffers.table[:, index, layout.PLACE].tolist() == places


def test_nothing_to_edit_is_the_program_that_is_only_watched():
    tables = ProgramTable(make_buffers())
    assert tables.acquire_program(()) == layout.WATCH_PROGRAM
    assert tables.acquire_group(()) == layout.NO_GROUP
    tables.release_program(())
    tables.release_group(())
    assert_free(tables)


# ---------------------------------------------------------------- shared by content


def test_equal_edits_share_one_program_and_their_vectors_whoever_made_them():
    tables = ProgramTable(make_buffers())
    steps = add(VECTORS[0])
    one = edits_of((0, steps), (2, add(VECTORS[1], 2.0)))
    other = edits_of((0, add(Vector(VECTORS[0].data))), (2, add(VECTORS[1], 2.0)))
    index = tables.acquire_program(one)
    assert tables.acquire_program(other) == index
    assert tables.instructions.bank.used == 2
    tables.release_program(one)
    assert tables.in_use == 1, "the other still uses it"
    tables.release_program(other)
    assert_free(tables)


@pytest.mark.parametrize(
    "other",
    [
        edits_of((1, add(VECTORS[0]))),
        edits_of((0, add(VECTORS[0], 2.0))),
        edits_of((0, add(VECTORS[1]))),
        edits_of((0, (replace(add()[0], flags=Flags.COUNTED | Flags.KEEP),))),
        edits_of((0, add()), ids=(1,)),
        edits_of((0, add()), ids=(2,)),
        edits_of((0, add()), ids=(1,), others=True),
        edits_of((0, add()), (0, add())),
        (),
    ],
)
def test_edits_that_differ_in_anything_are_different_programs(other):
    tables = ProgramTable(make_buffers())
    index = tables.acquire_program(edits_of((0, add(VECTORS[0]))))
    assert tables.acquire_program(other) != index


# ---------------------------------------------------------------- used again


def test_a_program_that_is_used_again_is_not_written_again(monkeypatch):
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    wanted = edits_of((0, add(VECTORS[0])), (2, rows(3, 1)))
    index = tables.acquire_program(wanted)
    tables.release_program(wanted)
    with monkeypatch.context() as patch:
        patch.setattr(tables.instructions, "write", None)
        assert tables.acquire_program(wanted) == index
        with pytest.raises(TypeError):
            tables.acquire_program(edits_of((0, add(VECTORS[1]))))
    assert_program(buffers, index, wanted)
    tables.release_program(wanted)
    assert tables.in_use == 0


@pytest.mark.parametrize(
    ("room", "wanted"),
    [
        ({"bank_rows": 4}, edits_of((2, rows(3, 10)))),
        ({"programs": 6}, edits_of((2, add()))),
        ({"max_edits": 4}, edits_of((2, add()), (3, add()))),
        ({"token_ids": 4}, edits_of((2, add()), ids=(6, 7, 8))),
    ],
)
def test_programs_that_nobody_uses_make_room_and_those_in_use_stay(room, wanted):
    buffers = make_buffers(**room)
    tables = ProgramTable(buffers)
    held = [edits_of((0, add(Vector.parse([float(n), 9.0, 9.0, 9.0]))), ids=(n,)) for n in range(4)]
    places = {each: tables.acquire_program(each) for each in held}
    for each in held[1:]:
        tables.release_program(each)
    new = tables.acquire_program(wanted)
    assert_program(buffers, new, wanted)
    assert_program(buffers, tables._programs[held[0]].index, held[0])
    assert places[held[0]] == tables._programs[held[0]].index
    assert (tables.in_use, len(tables._programs)) == (2, 2)
    # One that made room is written anew, and says what it said.
    for each in (wanted, held[0]):
        tables.release_program(each)
    assert_program(buffers, tables.acquire_program(held[2]), held[2])
    tables.release_program(held[2])
    assert_free(tables)


# ---------------------------------------------------------------- no room


@pytest.mark.parametrize(
    ("room", "wanted", "message"),
    [
        ({"bank_rows": 2}, edits_of(*((0, add(VECTORS[n])) for n in range(3))), "bank_rows"),
        (
            {"bank_rows": 2},
            edits_of((0, rows(3, 0))),
            "3 vectors, 12 numbers, do not fit .*`bank_rows`",
        ),
        ({"max_edits": 2}, edits_of(*((n, add()) for n in range(3))), "3 instructions .*max_edits"),
        ({"token_ids": 2}, edits_of((0, add()), ids=(1, 2, 3)), "3 token ids .*`token_ids`"),
        ({"programs": 2}, edits_of((0, add())), "all 2 combinations of edits; .*`programs`"),
    ],
)
def test_what_does_not_fit_is_refused_naming_the_setting_and_leaves_nothing(room, wanted, message):
    buffers = make_buffers(**room)
    tables = ProgramTable(buffers)
    with pytest.raises(SpecError, match=message):
        tables.acquire_program(wanted)
    assert_free(tables)


def test_groups_that_do_not_fit_are_refused_naming_the_setting():
    tables = ProgramTable(make_buffers(programs=3))
    tables.acquire_group((0,))
    tables.acquire_group((1,))
    with pytest.raises(SpecError, match="all 3 combinations of captures; .*`programs`"):
        tables.acquire_group((2,))
    tables.release_group((0,))
    tables.acquire_group((2,))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.none(), programs(NUM_TAPS))),
        min_size=4,
        max_size=40,
    )
)
def test_whatever_comes_and_goes_every_program_keeps_saying_what_it_said(steps):
    buffers = make_buffers(bank_rows=14, programs=9, max_edits=24, token_ids=7)
    tables = ProgramTable(buffers)
    held: list[tuple[TapProgramStep, ...]] = []
    for nth, wanted in steps:
        if wanted is None:
            if held:
                tables.release_program(held.pop(nth % len(held)))
        else:
            assert _acquire(tables, wanted) == _has_room(buffers, held, wanted)
            if wanted in tables._programs and tables._programs[wanted].users > held.count(wanted):
                held.append(wanted)
        for each in held:
            assert_program(buffers, tables._programs[each].index, each)
        tables.check_integrity()
    for each in held:
        tables.release_program(each)
    assert_free(tables)


def _acquire(tables: ProgramTable, wanted: tuple[TapProgramStep, ...]) -> bool:
    try:
        tables.acquire_program(wanted)
    except SpecError:
        return False
    return True


def _has_room(buffers, held, wanted) -> bool:
    """Whether everything would fit, laid out anew."""
    every = {*held, wanted}
    runs = {
        run
        for each in every
        for edit in each
        for step in edit.steps
        for run in ([(step.read,)] if step.read else []) + ([step.write] if step.write else [])
    }
    lists = {edit.ids for each in every for edit in each if edit.ids}
    return (
        len(every) <= buffers.table.shape[1] - layout.FIRST_FREE_PROGRAM
        and sum(len(edit.steps) for each in every for edit in each) <= buffers.instructions.shape[0]
        and sum(map(len, runs)) <= buffers.bank.shape[0]
        and sum(map(len, lists)) <= buffers.lists.shape[0]
    )
