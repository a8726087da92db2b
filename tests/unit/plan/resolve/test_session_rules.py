"""Positions in a prompt that grows: what means the same however long it gets, and what does not."""

import pytest
from support.refusals import refused_calls

from midstream.errors import SpecError
from midstream.plan import (
    Capture,
    Image,
    Plan,
    Positions,
    Probe,
    Role,
    Span,
    Steer,
    Text,
    TokenIds,
    Window,
)
from midstream.plan.resolve.session_rules import check_growing


def plan_at(positions: object) -> Plan:
    return Plan(captures=(Capture([0], positions=positions),))


def test_positions_counted_from_the_start_and_ids_are_known_whatever_comes():
    for positions in (
        "all",
        "last_row",
        0,
        [3, 7],
        Span(2, 9, 3),
        Span(5, None),
        TokenIds([4, 5]),
        Positions(["all"], exclude=[2, TokenIds(9), Span(0, 4)]),
    ):
        check_growing(plan_at(positions), ())
        check_growing(
            None, (Steer([1.0], 0, positions=positions),) if positions != "last_row" else ()
        )


def test_what_depends_on_where_the_prompt_ends_is_refused_by_its_place():
    for positions, path in (
        ("generated", "positions"),
        ("last_prompt", "positions"),
        (-1, "positions"),
        ([4, -2], "positions[1]"),
        (Span(-3, None), "positions"),
        (Window(0, 4), "positions"),
        (Text("a"), "positions"),
        (Role("user"), "positions"),
        (Image(0), "positions"),
        (Positions("all", phase="generated"), "phase"),
        (Positions("all", exclude=[1, -1]), "exclude[1]"),
        (Positions("all", exclude="last_prompt"), "exclude"),
    ):
        with pytest.raises(SpecError, match="unsupported in a streaming-input session") as found:
            check_growing(plan_at(positions), ())
        assert found.value.path == f"capture[0].{path}", positions


def test_every_part_of_a_plan_and_what_comes_before_it_is_looked_at():
    fine, wrong = Steer([1.0], 0), Steer([1.0], 0, phase="generated")
    probe = Probe([1.0], 0, name="p", positions=[0, -1])
    refused_calls(
        (lambda: check_growing(None, (fine, wrong)), "steering[1].phase", ""),
        (lambda: check_growing(Plan(edits=(fine, wrong)), ()), "edits[1].phase", ""),
        (lambda: check_growing(Plan(probes=(probe,)), ()), "probes[0].positions[1]", ""),
    )
