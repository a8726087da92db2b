"""Guards: definitions, versions, promotion, rollback, scopes, and what several processes have."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.errors import NoRoomError, SpecError, StoreError
from midstream.plan.control.act import Flag, Stop
from midstream.plan.operations import Steer
from midstream.plan.probe import Probe
from midstream.plan.shape import ModelShape
from midstream.steering import VectorRegistry, guards
from midstream.steering.guard_definition import Scope, fingerprint, read_definition, share_of
from midstream.steering.guards import Guards
from midstream.steering.shared_folder import SharedFolder
from midstream.steering.tiers import Steering

WIDTH = 4
V = np.array([0.1, -2.5, 3.25e-8, 7.0], "float32")
SHAPE = ModelShape(3, WIDTH, [("resid_post", layer) for layer in range(3)])
PROBE = Probe(V, layer=1, phase="generated")
FORM: dict[str, Any] = {"probe": PROBE.to_dict(), "above": 2.0}


def registry() -> Guards:
    vectors = VectorRegistry(SHAPE)
    vectors.register("toxic", {1: V})
    return Guards(vectors)


class Member:
    """One process's guards in a folder."""

    def __init__(self, folder: Path) -> None:
        vectors = VectorRegistry(SHAPE)
        self.guards = Guards(vectors)
        self.folder = SharedFolder(str(folder), vectors, Steering(vectors), self.guards)

    def state(self) -> Any:
        self.guards.active()
        histories = self.guards.state.histories
        kept = {name: [one.to_dict(full=True) for one in each] for name, each in histories.items()}
        return kept, self.guards.state.dropped


def test_a_guard_is_put_promoted_and_rolled_back_and_every_change_is_a_version():
    found = registry()
    assert found.put("toxic", FORM, "me").number == 1
    assert found.promote("toxic").definition.action == "flag"
    assert found.promote("toxic").definition.action == "stop"
    with pytest.raises(SpecError, match="'stop' cannot be promoted"):
        found.promote("toxic")
    back = found.rollback("toxic", 1, "you")
    assert (back.number, back.change, back.who) == (4, "rollback", "you")
    assert back.digest == found.history("toxic")[0].digest
    assert found.rollback("toxic").definition.action == "stop"
    assert [one.number for one in found.history("toxic")] == [1, 2, 3, 4, 5]
    assert [one.change for one in found.history("toxic")[:2]] == ["put", "promote"]


def test_a_deleted_guard_keeps_its_history_and_can_come_back():
    found = registry()
    found.put("toxic", FORM)
    assert found.remove("toxic").number == 2
    assert found.active() == ()
    for call in (found.show, found.remove, found.promote):
        with pytest.raises(SpecError, match="there is no guard 'toxic'"):
            call("toxic")
    assert [one.definition is None for one in found.history("toxic")] == [False, True]
    assert found.rollback("toxic").number == 3
    assert [one.name for one in found.active()] == ["toxic"]
    with pytest.raises(SpecError, match="there is no guard 'other'"):
        found.history("other")
    with pytest.raises(SpecError, match="`toxic` has the versions 1, 3, not 2"):
        found.rollback("toxic", 2)


def test_the_probe_of_a_request_has_the_name_the_version_and_the_act_of_its_guard():
    found = registry()
    found.put("toxic", FORM)
    (active,) = found.active()
    assert (active.probe.name, active.probe.act) == ("guard:toxic:1", Flag(above=2.0))
    found.put("toxic", {**FORM, "action": "stop", "for": 2, "pool": "mean:4"})
    (active,) = found.active()
    assert active.probe.name == "guard:toxic:2"
    assert active.probe.act == Stop(above=2.0, for_=2, pool="mean:4")
    edits = [{"op": "steer", "vector": {"name": "toxic"}, "layer": 1}]
    found.put("toxic", {**FORM, "action": "switch", "edits": edits})
    (active,) = found.active()
    assert isinstance(active.probe.act.edits[0], Steer)
    assert active.probe.act.is_bound


def test_a_name_is_resolved_when_the_guard_is_put():
    found = registry()
    found.put("toxic", {"probe": "toxic", "above": 0})
    assert found.active()[0].probe.direction.numpy().tolist() == V.tolist()
    assert found.active()[0].probe.layers.indices == (1,)


@pytest.mark.parametrize("probe", [PROBE, PROBE.to_dict(), {"op": "probe", **PROBE.to_dict()}])
def test_every_form_of_a_probe_is_taken(probe):
    assert read_definition({"probe": probe, "above": 2}).probe == PROBE


def test_the_condition_of_an_act_is_the_threshold():
    acting = PROBE.replace(act=Stop(below=-1.0, for_=3))
    found = read_definition({"probe": acting.to_dict()})
    assert (found.probe, found.condition) == (PROBE, Flag(below=-1.0, for_=3))


WRONG = [
    ({"probe": PROBE.to_dict()}, "above", "give `above` or `below`"),
    ({**FORM, "below": 1}, "below", "give `above` or `below`"),
    ({**FORM, "threshold": 1}, "", "unknown field 'threshold'"),
    ({"above": 1.0}, "above", "only a guard with a probe"),
    ({}, "probe", "missing"),
    ({**FORM, "action": "block"}, "action", "expected one of"),
    ({**FORM, "action": "switch"}, "edits", "missing"),
    ({**FORM, "edits": []}, "edits", "only the action"),
    ({**FORM, "action": "webhook"}, "webhook", "missing"),
    ({**FORM, "webhook": "file:///etc/passwd"}, "webhook.url", "http"),
    ({**FORM, "webhook": "http://[::1"}, "webhook.url", "is no URL"),
    ({**FORM, "webhook": "http://169.254.169.254/"}, "webhook.url", "use another"),
    ({**FORM, "webhook": "http://example.org/"}, "webhook.url", "use https"),
    ({**FORM, "webhook": {"url": "https://a", "seconds": 1e9}}, "webhook.seconds", "at most 60"),
    ({**FORM, "scope": {"share": 0}}, "scope.share", "more than 0"),
    ({**FORM, "scope": {"share": 1.5}}, "scope.share", "at most 1"),
    ({**FORM, "scope": {"keys": ["sk-secret"]}}, "scope.keys[0]", "the fingerprint"),
    ({**FORM, "scope": {"models": []}}, "scope.models", "a list of 1 to"),
    ({**FORM, "when": {"guard": "x", "above": 1, "below": 2}}, "when.above", "give `above`"),
    ({**FORM, "when": {"guard": "a b"}}, "when.guard", "expected 1 to 40"),
    ({**FORM, "when": {"guard": ".."}}, "when.guard", "the first no dot"),
    ({**FORM, "message": ""}, "message", "1 to 1000"),
    ({**FORM, "visible": 1}, "visible", "true or false"),
    ({**FORM, "probe": Probe(V, layer=9).to_dict()}, "probe.layer", "out of range|no layer"),
    ({**FORM, "probe": Probe(V[:2], layer=1).to_dict()}, "probe.direction", "expected 4"),
    ({**FORM, "probe": "unknown"}, "probe", "no vectors are registered"),
    ({**FORM, "probe": Probe(V, 1, positions="last_row").to_dict()}, "positions", "last_row"),
]


@pytest.mark.parametrize(("form", "path", "problem"), WRONG)
def test_what_is_wrong_is_rejected_with_its_field_and_changes_nothing(form, path, problem):
    found = registry()
    with pytest.raises(SpecError, match=problem) as caught:
        found.put("toxic", form)
    assert caught.value.path.startswith(path)
    assert found.state.histories == {}


def test_a_second_stage_needs_its_first_one_which_then_stays():
    found = registry()
    second = {**FORM, "when": {"guard": "cheap", "above": 1.0}}
    with pytest.raises(SpecError, match="`dear` runs after the guard `cheap`"):
        found.put("dear", second)
    found.put("cheap", FORM)
    found.put("dear", second)
    first, last = found.active()
    assert (first.name, first.later, last.name, last.probe) == ("cheap", None, "dear", None)
    assert last.later.name == "guard:dear:1"
    with pytest.raises(SpecError, match="is needed"):
        found.remove("cheap")
    with pytest.raises(SpecError, match="needs one without"):
        found.put("third", {**FORM, "when": {"guard": "dear"}})
    with pytest.raises(SpecError, match="needs one without"):
        found.put("cheap", {**FORM, "when": {"guard": "cheap"}})


def test_what_clients_can_fill_is_bounded(monkeypatch):
    monkeypatch.setattr(guards, "MAX_GUARDS", 2)
    monkeypatch.setattr(guards, "MAX_HISTORIES", 3)
    found = registry()
    for nth in range(40):
        found.put("a", {**FORM, "above": nth})
    assert len(found.history("a")) == guards.KEPT_VERSIONS
    assert found.history("a")[-1].number == 40
    found.put("b", FORM)
    with pytest.raises(NoRoomError, match="the limit of 2 guards"):
        found.put("c", FORM)
    with pytest.raises(NoRoomError, match="more than the limit of 300"):
        found.put("b", {**FORM, "message": "x" * 400}, room=300)
    for name in "cde":
        found.remove("b")
        found.put("b", FORM)
        found.remove("b")
        found.put(name, FORM)
        found.remove(name)
        found.put("b", FORM)
    assert len(found.state.histories) == 3
    # The numbers of a name go on after its history was dropped.
    highest = found.state.dropped
    assert highest > 0
    found.remove("b")
    assert found.put("c", FORM).number > highest


def test_what_a_request_cannot_have_is_rejected_together():
    def check(probes: tuple[Probe, ...]) -> None:
        if len(probes) > 1:
            raise SpecError("", "too many")

    found = Guards(VectorRegistry(SHAPE), check)
    found.put("a", FORM)
    with pytest.raises(SpecError, match="too many"):
        found.put("b", FORM)
    assert [one.name for one in found.active()] == ["a"]


@given(st.text("abcdef0123456789-", min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_a_share_is_chosen_by_the_id_alone(request_id, share):
    scope = Scope(share=share)
    chosen = scope.has("g", request_id, ("m",), "")
    assert chosen == (share_of("g", request_id) < share)
    assert chosen == Scope(share=share).has("g", request_id, ("other",), "key")


def test_a_share_has_about_as_many_requests_as_it_says():
    for share in (0.01, 0.1, 0.5):
        count = sum(Scope(share=share).has("g", f"cmpl-{nth}", (), "") for nth in range(20_000))
        assert abs(count / 20_000 - share) < 4 * np.sqrt(share * (1 - share) / 20_000)


def test_a_scope_has_the_requests_that_meet_all_of_it():
    key = fingerprint("sk-1")
    scope = Scope(models=("base", "tuned"), keys=(key,))
    assert scope.has("g", "1", ("served", "tuned"), key)
    assert not scope.has("g", "1", ("served",), key)
    assert not scope.has("g", "1", ("tuned",), fingerprint("sk-2"))


# -- several processes ---------------------------------------------------------------------------

CHANGES = st.tuples(
    st.sampled_from(["put", "put", "promote", "rollback", "remove"]),
    st.sampled_from(["a", "b", "c"]),
    st.integers(1, 6),
)


def apply(found: Guards, change: tuple[str, str, int]) -> None:
    what, name, number = change
    try:
        if what == "put":
            found.put(name, {**FORM, "above": float(number)})
        elif what == "rollback":
            found.rollback(name, number)
        else:
            getattr(found, what)(name)
    except SpecError:
        pass


def without_times(state: Any) -> Any:
    kept, dropped = state
    return {name: [{**one, "time": ""} for one in each] for name, each in kept.items()}, dropped


@given(st.lists(st.tuples(st.integers(0, 2), CHANGES), max_size=14))
@settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
def test_any_changes_by_any_process_are_those_of_one_and_a_restart_keeps_them(
    tmp_path_factory, changes
):
    folder = tmp_path_factory.mktemp("any") / "shared"
    members = [Member(folder) for _ in range(3)]
    alone = registry()
    numbers: dict[str, int] = {}
    for who, change in changes:
        apply(members[who].guards, change)
        apply(alone, change)
        assert members[0].state() == members[1].state() == members[2].state()
        for name, versions in members[0].guards.state.histories.items():
            assert versions[-1].number >= numbers.get(name, 0)
            numbers[name] = versions[-1].number
    assert Member(folder).state() == members[0].state()
    forms = {
        name: [one.to_dict(True) for one in each] for name, each in alone.state.histories.items()
    }
    assert without_times(members[0].state()) == without_times((forms, alone.state.dropped))
    files = {path.name for path in folder.glob("guard-*")}
    assert files == {
        f"guard-{one.digest}.json"
        for each in members[0].guards.state.histories.values()
        for one in each
        if one.digest
    }


def test_a_guard_that_switches_to_no_edits_is_served_from_a_folder_and_put_again(tmp_path):
    one, other = Member(tmp_path / "shared"), Member(tmp_path / "shared")
    made = one.guards.put("calm", {**FORM, "action": "switch", "edits": []})
    assert one.state() == other.state() == Member(tmp_path / "shared").state()
    assert made.definition is not None
    again = other.guards.put("calm", made.definition.to_dict())
    assert (again.number, again.digest) == (2, made.digest)


def test_a_guard_that_a_full_disk_lost_was_not_acknowledged(tmp_path, monkeypatch):
    one, other = Member(tmp_path / "shared"), Member(tmp_path / "shared")
    one.guards.put("toxic", FORM)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", full)
        with pytest.raises(StoreError, match="nothing was changed"):
            one.guards.promote("toxic")
    assert one.state() == other.state()
    assert one.guards.active()[0].version == other.guards.active()[0].version == 1


@pytest.mark.parametrize("damage", ["gone", "cut", "named"])
def test_nothing_is_served_from_a_folder_without_a_guard_that_its_index_names(tmp_path, damage):
    folder = tmp_path / "shared"
    Member(folder).guards.put("toxic", FORM)
    (path,) = folder.glob("guard-*")
    form = json.loads(path.read_text())
    form["probe"]["direction"] = {"name": "toxic"}
    text = {"gone": None, "cut": path.read_text()[:40], "named": json.dumps(form)}[damage]
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(StoreError, match="shared folder is damaged"):
        Member(folder)
