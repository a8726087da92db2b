"""The distribution of the training in a guard's definition."""

import pytest

from midstream.drift import ScoreBins, Training
from midstream.errors import SpecError
from midstream.plan.probe import Probe
from midstream.steering.guard_definition import read_definition

FORM = {"probe": Probe([1.0, 2.0], layer=1).to_dict(), "above": 2.0}
TRAINING = {"edges": [-1.0, 2.5], "counts": [5, 0, 7]}


def test_a_definition_keeps_it_and_its_digest_is_of_it_too():
    definition = read_definition({**FORM, "training": TRAINING})
    assert definition.training == Training(ScoreBins((-1.0, 2.5), (5, 0, 7)))
    for full in (True, False):
        assert definition.to_dict(full)["training"] == TRAINING
    assert read_definition(definition.to_dict()) == definition
    assert read_definition(FORM).content != definition.content
    assert "training" not in read_definition(FORM).to_dict()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({**FORM, "training": {"edges": [0.0], "counts": [1]}}, r"training\.counts: expected 2"),
        ({**FORM, "training": {"edges": [0.0]}}, r"training: missing field `counts`"),
        (
            {"when": {"guard": "a", "above": 1.0}, "action": "flag", "training": TRAINING},
            "training: only a guard with a probe has scores",
        ),
    ],
)
def test_a_wrong_one_is_rejected_by_its_field(form, message):
    with pytest.raises(SpecError, match=message):
        read_definition(form)
