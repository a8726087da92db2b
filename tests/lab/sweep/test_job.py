"""The runs of a sweep: what each edits, and where the unpatched ones are."""

import numpy as np
import pytest

from midstream import Capture, LogProb, Scale
from midstream.errors import SpecError
from midstream.lab.sweep import SweepRequest
from midstream.lab.sweep.job import SweepContext, SweepJob, SweepPrompt
from midstream.plan.positions.prompt import Prompt
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.vector import Vector

SHAPE = ModelShape(3, 4, [("resid_pre", layer) for layer in range(3)])


def prompt(length):
    return SweepPrompt(Prompt(length, tuple(range(length))), tuple(map(str, range(length))))


class EarlierRows:
    """Rows of layers 0 and 1, whose numbers tell layer and position."""

    taps = (("resid_pre", 0), ("resid_pre", 1))

    def positions(self, tap):
        return (1, 2, 4)

    def read(self, tap, positions):
        return tuple(Vector.parse([100.0 * tap[1] + one] * 4) for one in positions or (1, 2, 4))


def job(length=6, other=None, earlier=True, **fields):
    def lookup(name):
        raise SpecError("", f"`{name}` is not registered")

    rows = (lambda _name: EarlierRows()) if earlier else None
    context = SweepContext(SHAPE, lookup, rows)
    request = SweepRequest(**{"metric": LogProb(3), "sites": "resid_pre", **fields})
    return SweepJob(request, context, prompt(length), None if other is None else prompt(other))


def edits(found):
    """The edit of each (layer, position)."""
    runs = [one for one in found.runs() if one.cell is not None]
    return {(one.cell.tap[1], one.cell.positions[0]): one.plan.edits[0] for one in runs}


def test_rows_of_an_earlier_request_are_aligned_and_only_on_a_server():
    found = edits(job(8, source={"captured": "x", "positions": [2, 4]}, align="suffix"))
    values = {key: float(edit.rows[0].numpy()[0]) for key, edit in found.items()}
    assert values == {(0, 5): 2.0, (0, 7): 4.0, (1, 5): 102.0, (1, 7): 104.0}
    with pytest.raises(SpecError) as error:
        job(5, source={"captured": "x"}, earlier=False)
    assert error.value.path == "source.captured"


@pytest.mark.parametrize("repeats", [0, 1, 3, 7, 100])
def test_unpatched_runs_are_spread_among_the_cells(repeats):
    runs = list(job(source=0, repeats=repeats).runs())
    places = [nth for nth, one in enumerate(runs) if one.cell is None]
    assert len(places) == repeats
    assert len(runs) == 18 + repeats
    assert all(runs[nth].plan is None for nth in places)
    if 0 < repeats < 18:
        gaps = np.diff([-1, *places, len(runs)])
        assert gaps.max() - gaps.min() <= 1


def test_the_source_is_captured_only_where_cells_need_it():
    found = job(6, 9, source=[1, 2], layers=[0, 2], positions=[0, 5], align="suffix")
    own, other = found.first_runs()
    assert own.plan is None
    assert other.plan is not None
    assert other.plan.captures == (Capture([0, 2], "resid_pre", [3, 8], codec="raw"),)
    assert len(other.token_ids) == 9


def test_weights_scale_zeros_and_give_each_position_of_a_group_an_edit():
    (edit,) = edits(job(1, source=0, layers=0, alpha=0.5, mask=[1.0, 0.0, 2.0, 0.5])).values()
    assert isinstance(edit, Scale)
    assert edit.factor == Vector.parse([0.5, 1.0, 0.0, 0.75])
    assert edit.shift is None
    rows = {("resid_pre", 0): np.arange(24.0).reshape(6, 4)}
    found = job(6, source=rows, layers=0, groups={"two": [1, 4]}, mask=[0.0, 1.0, 1.0, 0.5])
    (run,) = [one for one in found.runs() if one.cell is not None]
    assert run.plan is not None
    shifts = [(one.positions.include, one.shift.numpy().tolist()) for one in run.plan.edits]
    assert shifts == [((1,), [0.0, 5.0, 6.0, 3.5]), ((4,), [0.0, 17.0, 18.0, 9.5])]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"source": 0, "align": "suffix"}, "align"),
        ({"source": {"name": "nothing"}}, "source"),
        ({"source": {("resid_pre", 0): np.ones((6, 5))}}, "source"),
        ({"source": 0, "mask": [4]}, "mask"),
        ({"source": 0, "mask": [0.5]}, "mask"),
        ({"source": {("resid_pre", 0): np.ones((5, 4))}}, "align"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_run(fields, path):
    with pytest.raises(SpecError) as error:
        job(**fields)
    assert error.value.path == path
