"""Rows of an earlier request by reference, and what becomes of edits that have them."""

import pytest
import torch
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import (
    CapturedRows,
    Gate,
    ModelShape,
    Plan,
    Prompt,
    Replace,
    Scale,
    Steer,
    Vector,
)
from midstream.plan.operations import has_captured
from midstream.plan.resolve.resolve import resolve

ID = "Yt3-2Wc0mUAF3mGf1g5n0ZJjzv0kq2aB"
TAPS = (("resid_post", 0), ("z", 1), ("resid_post", 1))
SHAPE = ModelShape(2, 2, TAPS, widths={("z", 1): 6}, heads={("z", 1): 3})
POSITIONS = (0, 2, 3)


class Source:
    """Row p of tap number n is n, p, 0, …"""

    taps = TAPS

    def read(self, tap, positions):
        width, number = SHAPE.width(tap), TAPS.index(tap)
        if not set(positions) <= set(POSITIONS):
            raise SpecError("positions", f"there are {POSITIONS}")
        return tuple(row(width, number, position) for position in positions or POSITIONS)


def row(width, number, position):
    return Vector.parse([float(number), float(position), *range(width - 2)])


def open_rows(name):
    if name != ID:
        raise SpecError("captured", "there are no rows")
    return Source()


def fill(*edits):
    return Plan.make(None, list(edits)).fill(open_rows, SHAPE)


def test_a_reference_has_two_forms():
    for rows in (CapturedRows(ID), {"captured": ID}):
        assert Replace(rows, layer=1).rows == CapturedRows(ID)
    some = Replace({"captured": ID, "positions": [3, 0]}, layer=1)
    assert some.rows == CapturedRows(ID).at([3, 0]) == CapturedRows(ID, torch.tensor([3, 0]))
    assert has_captured(Gate(some, [1.0]))
    assert not has_captured(Replace([1.0], 0))


def test_a_malformed_reference_is_rejected_by_its_path():
    refused(
        lambda rows: Replace(rows, layer=0),
        ({"captured": 3}, "rows.captured", "expected the id of cached rows, `str`, got `int`"),
        ({"captured": "../x"}, "rows.captured", "got '../x'"),
        ({"captured": "x" * 65}, "rows.captured", "expected the id"),
        ({"captured": ID, "positions": -1}, "rows.positions", "from 0 on, got -1"),
        ({"captured": ID, "positions": []}, "rows.positions", "1 to 4096 items, got 0"),
        ({"captured": ID, "positions": [1, 1]}, "rows.positions", "twice"),
        ({"captured": ID, "rows": 1}, "rows", "unknown field 'rows'"),
        ({"captured": ID, "layer": "all"}, "rows.layer", "`int`, got `str`"),
        ({"captured": ID, "layer": 1, "site": "resid"}, "rows.site", "did you mean `resid_post`"),
        ({"captured": ID, "site": "resid_post"}, "rows.site", "is for `layer`, which is missing"),
    )


def test_each_layer_gets_the_rows_that_were_captured_there():
    plan = fill(
        Scale(2.0, 0),
        Replace(CapturedRows(ID, [0, 3]), layer="all", positions=[4, 7], alpha=0.5),
        Gate(Replace(CapturedRows(ID, 2), layer=-1, site="resid_post"), [1.0, 0.0]),
    )
    found = [(edit.layers.indices, edit.sites.names) for edit in plan.edits]
    assert found == [((0,), ("resid_post",)), ((0,), ("resid_post",)), ((1,), ("resid_post",)),
                     ((1,), ("resid_post",))]  # fmt: skip
    assert [plan.origin(index) for index in range(4)] == [0, 1, 1, 2]
    first, second = plan.edits[1:3]
    assert first.rows == (row(2, 0, 0), row(2, 0, 3))
    assert second.rows == (row(2, 2, 0), row(2, 2, 3))
    assert (second.alpha, second.positions.include) == (0.5, (4, 7))
    assert plan.edits[3].edit.rows == (row(2, 2, 2),)
    assert len(resolve(plan, SHAPE, Prompt(9), 2).edits) == 6
    whole = fill(Replace(CapturedRows(ID), layer=0, positions=[1, 2, 3])).edits[0]
    assert whole.rows == tuple(row(2, 0, position) for position in POSITIONS)


def test_the_rows_of_a_named_layer_go_to_each_layer_of_the_edit():
    placed = {"positions": [4, 7], "norm": "match"}
    plan = fill(
        Steer(rows=CapturedRows(ID, [3, 0], layer=-1), layer=0, **placed),
        Replace({"captured": ID, "positions": 2, "layer": 0}, layer=[0, 1]),
        Gate(Steer(rows=CapturedRows(ID, 2, 0, "resid_post"), layer=1), [1.0, 0.0]),
        Steer(rows=CapturedRows(ID, [0, 2]), layer="all", positions=[1, 2]),
    )
    first, second, gated, *last = plan.edits
    assert first == Steer(rows=(row(2, 2, 3), row(2, 2, 0)), layer=0, **placed)
    assert second == Replace(row(2, 0, 2), layer=[0, 1])
    assert gated.edit == Steer(row(2, 0, 2), layer=1)
    assert [edit.rows for edit in last] == [tuple(row(2, n, p) for p in (0, 2)) for n in (0, 2)]
    assert [plan.origin(index) for index in range(5)] == [0, 1, 2, 3, 3]
    assert len(resolve(plan, SHAPE, Prompt(9), 2).edits) == 7
    moved = CapturedRows(ID, 1, 0, "resid_post").at([2])
    assert moved == CapturedRows.parse(moved.emit()) == CapturedRows(ID, 2, 0, "resid_post")


def test_each_head_gets_its_own_part_of_the_rows():
    (edit,) = fill(Replace(CapturedRows(ID, 3), layer=1, site="z", head=[0, 2])).edits
    assert (edit.heads, edit.dims, edit.rows) == ((), (0, 1, 4, 5), (row(6, 1, 3),))
    (edit,) = fill(Replace(CapturedRows(ID, 3), layer=1, site="z", head=2, dims=1)).edits
    assert (edit.heads, edit.dims) == ((), (5,))


def test_what_was_not_captured_is_rejected_by_name():
    for edit, path, problem in (
        (Replace(CapturedRows("x"), layer=0), "rows.captured", "there are no rows"),
        (Replace(CapturedRows(ID, 1), layer=0), "rows.positions", "there are"),
        (Replace(CapturedRows(ID), layer=2), "layer", "has no vector for resid_post at layer 2"),
        (Replace(CapturedRows(ID), layer=0, site="mlp_in"), "site", "the site mlp_in"),
        (Replace(CapturedRows(ID), layer=1, site="z", head=3), "head", "head 3 is out of range"),
        (Replace(CapturedRows(ID), layer=1, site="z", head=0, dims=2), "dims", "2 is out of range"),
        (Replace(CapturedRows(ID), layer=1, head=0), "head", "not of heads"),
        (Replace(CapturedRows(ID), layer=1, site="z", head=0, norm="keep"), "norm", "unsupported"),
        (Steer(rows=CapturedRows(ID), layer=1, site="z", head=0), "head", "rows, which are of all"),
        (
            Steer(rows=CapturedRows(ID, layer=5), layer=1),
            "rows.layer",
            "no rows of resid_post at "
            "layer 5 were captured; there are resid_post at layer 0, z at layer 1, resid_post at",
        ),
        (
            Replace(CapturedRows(ID, layer=0), layer=1, site=["resid_pre", "resid_post"]),
            "rows.site",
            "say which the rows are of",
        ),
    ):
        refused(
            lambda edit: fill(Scale(1.0, 0), edit),
            (edit, f"edits[1].{path}", problem),
            (Gate(edit, [1.0]), f"edits[1].edit.{path}", problem),
        )


def test_elsewhere_than_on_the_server_a_reference_is_rejected():
    for edit in (Replace(CapturedRows(ID), layer=0), Steer(rows=CapturedRows(ID), layer=0)):
        with pytest.raises(SpecError, match="only in a request to that server") as caught:
            resolve(Plan.make(None, edit), SHAPE, Prompt(4), 2)
        assert caught.value.path == "edits[0].rows.captured"
