"""What one process registers or sets holds in all processes of a folder, whoever is killed when."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.errors import BusyError, ConfigError, NoRoomError, SpecError, StoreError
from midstream.plan.operations import Clamp, Gate, Scale, Steer
from midstream.plan.probe import Probe
from midstream.plan.shape import ModelShape
from midstream.steering import VectorRegistry, shared_folder
from midstream.steering.guards import Guards
from midstream.steering.shared_folder import SharedFolder
from midstream.steering.tiers import Steering

WIDTH = 4
TAPS = [("resid_post", layer) for layer in range(3)]
V = np.array([0.1, -2.5, 3.25e-8, 7.0], "float32")


class Member:
    """One process's registry and tiers."""

    def __init__(self, folder: Path, taps: list[tuple[str, int]] = TAPS) -> None:
        self.vectors = VectorRegistry(ModelShape(3, WIDTH, taps))
        self.steering = Steering(self.vectors)
        self.guards = Guards(self.vectors)
        self.folder = SharedFolder(str(folder), self.vectors, self.steering, self.guards)

    def state(self) -> tuple[object, ...]:
        """All that it has, as JSON values."""
        forms = {one.name: self.vectors.form(one.name) for one in self.vectors.list()}
        about = [one.to_dict() for one in self.vectors.list()]
        return forms, about, self.steering.show().to_dict(), self.guards.state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def test_a_vector_and_an_edit_of_one_hold_on_all_when_the_call_returns(folder):
    one, other, third = Member(folder), Member(folder), Member(folder)
    one.vectors.register("happy", {1: V})
    assert other.vectors.show("happy")[0].digest == one.vectors.show("happy")[0].digest
    other.steering.set(base=["happy", 2.0], generated=Scale(0.5, 2, phase="generated"))
    third.vectors.register("happy", {1: -V})
    third.vectors.register("whole", {"edits": [Clamp(V, 1, low=0.5)]})
    assert one.state() == other.state() == third.state()
    assert one.steering.epoch == 1
    assert one.vectors.show("happy")[0].registered == 2
    one.vectors.remove("happy")
    assert "happy" not in other.vectors
    assert [edit.vector.numpy().tolist() for edit in third.steering.show().base] == [V.tolist()]
    other.steering.clear()
    assert not third.steering
    assert Member(folder).state() == one.state()


def test_what_is_rejected_changes_nothing_anywhere(folder):
    one, other = Member(folder), Member(folder)
    one.vectors.register("happy", {1: V})
    before, version = other.state(), one.folder.version
    with pytest.raises(SpecError):
        one.vectors.register("happy", {9: V})
    with pytest.raises(NoRoomError):
        other.vectors.register("more", {0: V}, room=4 * WIDTH)
    with pytest.raises(SpecError):
        one.steering.set(base="unhappy")
    with pytest.raises(SpecError):
        other.vectors.remove("unhappy")
    assert one.state() == other.state() == before
    assert one.folder.version == version


def test_reads_of_an_unchanged_folder_touch_no_file(folder, monkeypatch):
    one, other = Member(folder), Member(folder)
    one.vectors.register("happy", {1: V})
    assert len(other.vectors) == 1
    monkeypatch.setattr("builtins.open", None)
    assert other.vectors.lookup("happy")
    assert other.steering.plan_edits() == ()


EDITS = st.sampled_from(
    [Steer(V, 1, 2.0), Scale(1.5, 0), Clamp(V, 2, high=1.0, phase="prompt"),
     Gate(Steer(V, 1), Probe(V, 0, name="g"), threshold=0.25)]
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c/d", "e:f"])
NUMBERS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False),
                   min_size=WIDTH, max_size=WIDTH)  # fmt: skip
CHANGES = st.one_of(
    st.tuples(st.just("register"), NAMES, NUMBERS),
    st.tuples(st.just("whole"), NAMES, st.lists(EDITS, min_size=1, max_size=3)),
    st.tuples(st.just("remove"), NAMES, st.none()),
    st.tuples(st.just("set"), st.sampled_from(["base", "prompt"]), st.lists(EDITS, max_size=2)),
)


def apply(member: Member, change: tuple[str, str, object]) -> None:
    what, name, value = change
    try:
        if what == "register":
            member.vectors.register(name, {1: np.array(value, "float32")})
        elif what == "whole":
            member.vectors.register(name, {"edits": value})
        elif what == "remove":
            member.vectors.remove(name)
        else:
            member.steering.set(**{name: value})
    except SpecError:
        pass


@given(st.lists(st.tuples(st.integers(0, 2), CHANGES), max_size=12))
@settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
def test_any_changes_in_any_order_are_those_of_one_process(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("any") / "shared"
    members = [Member(folder) for _ in range(3)]
    alone = Member(tmp_path_factory.mktemp("alone") / "shared")
    for who, change in changes:
        apply(members[who], change)
        apply(alone, change)
        assert all(one.state() == alone.state() for one in members)
    assert Member(folder).state() == alone.state()


def test_threads_of_several_members_lose_no_change(folder):
    members = [Member(folder) for _ in range(3)]

    def register(member: Member, prefix: str) -> None:
        for nth in range(8):
            member.vectors.register(f"{prefix}{nth}", {1: V * nth})
            assert f"{prefix}{nth}" in members[0].vectors

    threads = [
        threading.Thread(target=register, args=(one, f"{nth}{letter}"))
        for nth, one in enumerate(members)
        for letter in "ab"
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert [len(one.vectors) for one in members] == [48] * 3


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_shared_folder import Member, V
member = Member(Path(sys.argv[1]))
print("joined", flush=True)
n = 0
while True:
    member.vectors.register(f"v{{n % 5}}", {{1: V * (n + 1)}})
    member.steering.set(base=f"v{{n % 5}}")
    member.guards.put("g", {{"probe": {{"direction": V, "layer": 1}}, "above": n}})
    print(n, flush=True)
    n += 1
"""


@pytest.mark.engine
def test_a_process_that_is_killed_while_it_changes_leaves_a_state_that_goes_on(folder):
    members = [Member(folder), Member(folder)]
    path = [str(Path(__file__).parent), *sys.path]
    for delay in (0.0, 0.013, 0.031):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER.format(path=path), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        process.stdout.readline()
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait(30)
        assert process.returncode == -signal.SIGKILL
        # What it said that it had changed holds; the members go on, and agree.
        epoch = members[0].steering.epoch
        assert epoch >= len(said)
        assert members[0].guards.show("g").number == members[1].guards.show("g").number
        assert members[0].guards.show("g").number >= len(said)
        members[1].vectors.register("after", {0: V})
        members[0].steering.set(prompt="after")
        assert members[0].state() == members[1].state() == Member(folder).state()


def test_a_change_that_was_not_announced_holds_with_the_next_one(folder):
    one, other = Member(folder), Member(folder)
    counter = one.folder._counter
    one.folder._counter = [one.folder._read]  # it is killed before it raises the counter
    one.vectors.register("happy", {1: V})
    one.folder._counter = counter
    assert "happy" not in other.vectors
    with pytest.raises(SpecError):
        other.vectors.remove("unknown")
    assert "happy" in other.vectors
    assert other.folder.version == other.folder._read


def test_a_lock_that_is_not_released_is_busy(folder, monkeypatch):
    monkeypatch.setattr(shared_folder, "LOCK_SECONDS", 0.1)
    one, other = Member(folder), Member(folder)
    with one.folder.changing(), pytest.raises(BusyError, match="another server changes"):
        other.vectors.register("happy", {1: V})
    other.vectors.register("happy", {1: V})
    assert "happy" in one.vectors


def test_a_damaged_folder_is_an_error_and_nothing_is_served_from_it(tmp_path):
    for nth, damage in enumerate((
        lambda folder: (folder / "index.json").unlink(),
        lambda folder: [one.unlink() for one in folder.glob("vectors-*")],
        lambda folder: (folder / "index.json").write_text('{"version": 99'),
    )):  # fmt: skip
        folder = tmp_path / str(nth)
        one, other = Member(folder), Member(folder)
        one.vectors.register("happy", {1: V})
        damage(folder)
        with pytest.raises(StoreError, match="shared folder is damaged"):
            other.steering.plan_edits()


def test_a_full_disk_changes_nothing(folder, monkeypatch):
    one, other = Member(folder), Member(folder)
    one.vectors.register("happy", {1: V})
    before = other.state()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", full)
        with pytest.raises(StoreError, match="nothing was changed.*No space left"):
            one.vectors.register("sad", {1: -V})
        with pytest.raises(StoreError):
            one.steering.set(base="happy")
    assert one.state() == other.state() == before
    other.steering.set(base="happy")
    assert one.state() == other.state()


def test_servers_of_other_models_and_folders_of_others_are_rejected(folder):
    Member(folder)
    with pytest.raises(ConfigError, match="another model, other sites"):
        Member(folder, TAPS[:2])
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="this user alone"):
        Member(folder)


def test_an_edit_by_name_in_a_file_is_damage_and_no_wait(folder):
    """To look the name up would wait for the reading that it is part of."""
    one, other = Member(folder), Member(folder)
    one.vectors.register("whole", {"edits": [Steer(V, 1)]})
    index = json.loads((folder / "index.json").read_text())
    form = json.loads((folder / index["vectors"]["whole"][0]).read_text())
    form["edits"][0]["vector"] = {"name": "whole"}
    index["vectors"]["whole"] = ["vectors-x.json", 2]
    index["version"] += 1
    (folder / "vectors-x.json").write_text(json.dumps(form))
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "counter").open("r+b").write(index["version"].to_bytes(8, sys.byteorder))
    for _ in range(2):
        with pytest.raises(StoreError, match="damaged .*an edit by value, got the name 'whole'"):
            other.vectors.list()
