"""Programs of the device's tables, read back like the `site` op reads them."""

from hypothesis import strategies as st

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.plan import Instruction, Steps, Vector
from midstream.runtime.protocol.segments import TapProgramStep
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.runtime.worker.tables.program_table import ProgramTable


def assert_program(buffers: Buffers, index: int, edits: tuple[TapProgramStep, ...]) -> None:
    """A program of the table does what these edits say: at each tap its own, in their order."""
    for tap in range(buffers.table.shape[0]):
        wanted = [(edit, step) for edit in edits if edit.tap == tap for step in edit.steps]
        start, count, _, kind = buffers.table[tap, index].tolist()
        assert count == len(wanted)
        maps = [nth for nth, (_, step) in enumerate(wanted) if step.op is Op.MAP]
        kinds = {_simple(one) for one in wanted}
        assert kind == (layout.WITH_MAP + maps[0] if maps else _only(kinds))
        for place, (edit, step) in enumerate(wanted, start):
            _assert_instruction(buffers, place, edit, step)


def _only(kinds: set[int]) -> int:
    return kinds.pop() if len(kinds) == 1 else layout.ANY


def _simple(one: tuple[TapProgramStep, Instruction]) -> int:
    """PLAIN: an instruction only adds a vector to every token. READS: it only stores a score."""
    edit, step = one
    usual = Flags.FRESH | Flags.COUNTED
    if edit.by_token or step.mask is not None:
        return layout.ANY
    if step.op == Op.ADD and step.flags | usual == usual:
        return layout.PLAIN
    reads = usual | Flags.ADDS
    is_read = step.op == Op.PROBE and step.slot is not None and step.flags | reads == reads
    return layout.READS if is_read else layout.ANY


def _assert_instruction(
    buffers: Buffers, place: int, edit: TapProgramStep, step: Instruction
) -> None:
    word = buffers.instructions[place].tolist()
    op, read, write, slot, flags, ids_start, ids_count, mask = word
    assert op == step.op
    assert flags == step.flags | (Flags.OTHER_IDS if edit.others else Flags.NONE)
    assert slot == (0 if step.slot is None else 1 + step.slot)
    assert buffers.params[place].tolist() == [step.a, step.b, step.c, step.d]
    if edit.bit is None:
        assert tuple(buffers.lists[ids_start : ids_start + ids_count].tolist()) == edit.ids
    else:
        assert (ids_start, ids_count) == (edit.bit, layout.BY_BIT)
    if step.read is not None:
        rows = step.read.size // buffers.unit
        assert buffers.bank[read : read + rows].flatten().tolist() == step.read.numpy().tolist()
    if step.mask is None:
        assert mask == 0
    else:
        assert buffers.bank[mask - 1].tolist() == step.mask.numpy().tolist()
    first = step.first if Flags.ROW_BY_POSITION in step.flags else 0
    for nth, vector in enumerate(step.write):
        units = vector.size // buffers.unit
        start = write + (first + nth) * units
        assert buffers.bank[start : start + units].flatten().tolist() == vector.numpy().tolist()


def assert_free(tables: ProgramTable) -> None:
    """Check that no program is in use, and that nothing is left of those that were."""
    tables.check_integrity()
    assert tables.in_use == 0
    tables.drop_unused()
    tables.check_integrity()
    assert tables.instructions.bank.used == tables.instructions.lists.used == 0
    assert tables.instructions.ranges.free == tables.instructions.ranges.size
    assert not tables._programs
    assert not tables._groups
    assert len(tables._free_programs) == tables._rows - layout.FIRST_FREE_PROGRAM
    assert len(tables._free_groups) == tables._rows - layout.FIRST_FREE_GROUP


# Few of each kind, so that random programs share them.
vectors = st.integers(0, 5).map(lambda n: Vector.parse([float(n), 1.0, -1.0, 0.5 * n]))
runs = st.lists(vectors, min_size=1, max_size=4).map(tuple)
scalars = st.sampled_from([0.0, 0.5, -2.0])
flags = st.sampled_from(
    [Flags.COUNTED, Flags.FRESH | Flags.COUNTED, Flags.GATED, Flags.KEEP | Flags.FRESH, Flags.STEP]
)


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    """An instruction of any kind but MAP, CODE, RECONSTRUCT and SCAN, with what it needs."""
    rare = (Op.MAP, Op.CODE, Op.RECONSTRUCT, Op.SCAN)
    op = draw(st.sampled_from([each for each in Op if each not in rare]))
    found = {name: draw(scalars) for name in "abcd"}
    modifiers = draw(flags)
    if op not in (Op.GATE, Op.PROBE, Op.SCALE):
        found["write"] = draw(runs)
        if len(found["write"]) > 1:
            modifiers |= Flags.ROW_BY_POSITION
            found["first"] = draw(st.integers(0, 90))
    if op in (Op.GATE, Op.PROBE):
        found["slot"] = draw(st.sampled_from([None, 0, 3])) if op is Op.GATE else 1
    if op in (Op.CLIP, Op.LINEAR, Op.FEATURE, Op.PROBE) or (op is Op.GATE and not found["slot"]):
        found["read"] = draw(vectors)
        if op is Op.GATE:
            found["slot"] = None
    return Instruction(op, flags=modifiers, **found)


all_steps = st.lists(instructions(), min_size=1, max_size=3).map(lambda found: Steps(tuple(found)))
id_lists = st.sets(st.integers(0, 9), max_size=3).map(lambda found: tuple(sorted(found)))


@st.composite
def edits(draw: st.DrawFn, num_taps: int) -> TapProgramStep:
    """One edit at one of some taps."""
    steps, ids = draw(all_steps), draw(id_lists)
    others = bool(ids) and draw(st.booleans())
    tap = draw(st.integers(0, num_taps - 1))
    bit = draw(st.none() if ids else st.none() | st.integers(0, layout.MAX_BITS - 1))
    return TapProgramStep(tap, steps.instructions, steps.digest, ids, others, bit)


def programs(num_taps: int) -> st.SearchStrategy[tuple[TapProgramStep, ...]]:
    """Strategy for the programs of one token."""
    return st.lists(edits(num_taps), min_size=1, max_size=4).map(tuple)
