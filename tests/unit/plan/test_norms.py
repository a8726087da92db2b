"""`Norms` as a part of a plan."""

import pytest
from support.readings import readings
from support.refusals import refused_calls
from support.stored import worker_info

from midstream import Capture, Norms
from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan, Prompt
from midstream.plan.readouts import parse_readout
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.frontend.request.readouts import EngineReadings, finished

TAPS = [(site, layer) for layer in range(3) for site in ("resid_post", "z")] + [("final_norm", 2)]
SHAPE = ModelShape(3, 4, TAPS)


def test_it_has_one_number_of_each_tap_and_reads_the_vectors() -> None:
    plan = Plan.make(capture=[Norms([0, 2]), Capture([0]), Capture([1], reduce="norm")])
    resolved = resolve(plan, SHAPE, Prompt(6), 3)
    assert resolved.captures[0].taps == (("norms.resid_post", 0), ("norms.resid_post", 2))
    assert resolved.pattern_widths["norms.resid_post", 2] == 1
    assert set(resolved.read_taps) == {("resid_post", layer) for layer in range(3)}


def test_what_is_malformed_is_refused() -> None:
    refused_calls(
        (lambda: Norms(), "", "missing field `layers`"),
        (lambda: Norms(sites="logits"), "sites", "logits are returned by Logits"),
        (lambda: Norms(0, stream=1), "stream", "expected `bool`"),
        (lambda: Norms(0, positions=[3, 1]), "positions[1]", "rows are in the order"),
        (lambda: Norms(0, codec="raw"), "codec", "unknown argument of Norms"),
        (lambda: parse_readout({"norms": False, "layers": 0}), "norms", "expected true, got False"),
        (lambda: parse_readout({"norms": True, "layers": 0, "codec": "raw"}), "", "unknown field"),
        (lambda: Norms(0, sink="files", stream=True), "stream", 'requires the sink "memory"'),
        (lambda: Norms(0, layout="packed"), "layout", "must be omitted for the sink memory"),
        (lambda: Norms(0, tag="../a"), "tag", "expected 1 to 128 of the characters"),
        (
            lambda: resolve(
                Plan.make(capture=[Norms("all", positions=0), Norms(1)]), SHAPE, Prompt(6), 3
            ),
            "capture[1]",
            "capture.0. returns norms of resid_post of layer 1 too",
        ),
        (
            lambda: resolve(Plan.make(capture=Norms(1, "mlp_out")), SHAPE, Prompt(6), 3),
            "capture[0].sites",
            "is not tapped",
        ),
    )


def test_vectors_that_ranks_have_in_parts_have_no_norm() -> None:
    plan = Plan.make(capture=[Norms(0), Norms("all", "z")])
    resolved = resolve(plan, SHAPE, Prompt(6), 3)
    whole = readings([worker_info(taps=tuple(TAPS))])
    assert finished(resolved, plan, whole) == (resolved, ())
    split = EngineReadings(None, [worker_info(taps=tuple(TAPS))], {("z", 1): 2})
    with pytest.raises(SpecError, match="z is split over the ranks") as caught:
        finished(resolved, plan, split)
    assert caught.value.path == "capture[1].sites"
