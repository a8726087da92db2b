"""The sinks of an engine: opened together or not at all, and asked about each plan."""

from types import SimpleNamespace

import pytest
from support.own_process import python
from support.sinking import ORIGIN, Noting, delivery

from midstream.config.sinks import plain_sinks, read_sinks
from midstream.errors import ConfigError, SpecError
from midstream.plan import Capture, ModelShape, Plan
from midstream.sinks import registry as finding
from midstream.sinks.server_captures import ServerCaptures
from midstream.sinks.sink_set import Pace, SinkSet
from midstream.store import open_store


class Opening(Noting):
    """Notes that it was opened, by whom, and that it was closed."""

    made = []

    def __init__(self, fails=False):
        super().__init__()
        self.is_failing = fails

    def open(self, origin):
        if self.is_failing:
            raise OSError("no disk")
        self.calls.append(f"open {origin.model}")
        self.made.append(self)

    def check(self, tag, request_id):
        if tag == "full":
            raise SpecError("tag", "no room there")


@pytest.fixture(autouse=True)
def offered(monkeypatch):
    names = ("one", "two")
    entries = [SimpleNamespace(name=name, load=lambda: Opening) for name in names]
    monkeypatch.setattr(finding, "entry_points", lambda group: entries)
    monkeypatch.setattr(Opening, "made", [])


def opened(given):
    return SinkSet(read_sinks(plain_sinks(given)), ORIGIN)


def test_without_settings_there_is_memory_and_captures_are_those_of_all_sinks():
    sinks = opened({})
    assert sinks.names == ("memory",)
    sinks.check(Plan((Capture(0),)))
    sinks.drain()
    sinks.close()
    sinks = opened({"one": {"capture": {"layers": 1}}, "memory": {"capture": {"layers": 2}}})
    assert sinks.captures == (Capture(1, sink="one"), Capture(2))
    assert sinks.names == ("memory", "one")
    sinks.close()


def test_only_a_sink_that_wants_rows_as_they_come_has_a_pace(monkeypatch):
    assert [opened("one").pace(name) for name in ("one", "memory", "nobody")] == [None] * 3
    monkeypatch.setattr(Opening, "wants", "rows")
    monkeypatch.setattr(Opening, "piece_bytes", 7)
    assert opened("one").pace("one") == Pace(1.0, 7)


def test_each_is_opened_told_where_rows_come_from_and_closed():
    sinks = opened(["one", "two"])
    assert sinks.names == ("memory", "one", "two")
    told = sinks.queue("two").put(delivery(), 1)
    sinks.drain()
    assert told.result(10).status == "ok"
    sinks.close()
    one, two = Opening.made
    assert one.calls == ["open a/model", "close"]
    assert two.calls == ["open a/model", "write r", "flush", "close"]


def test_where_one_cannot_be_made_or_opened_none_stays_open():
    with pytest.raises(ConfigError, match="midstream.sinks.two"):
        opened({"one": {}, "two": {"x": 1}})
    assert Opening.made == []
    with pytest.raises(OSError, match="no disk"):
        opened({"one": {}, "two": {"fails": True}})
    assert [one.calls for one in Opening.made] == [["open a/model", "close"]]


def test_a_plan_is_refused_by_the_capture_that_is_wrong():
    sinks = opened("one")
    sinks.check(Plan((Capture(0), Capture(1, sink="one", tag="t"))))
    with pytest.raises(
        SpecError, match="this engine has no sink 'ones'.*`memory`, `one`"
    ) as caught:
        sinks.check(Plan((Capture(0), Capture(1, sink="ones"))))
    assert caught.value.path == "capture[1].sink"
    assert "did you mean `one`" in str(caught.value)
    with pytest.raises(SpecError, match="no room there") as caught:
        sinks.check_places(Plan((Capture(0, sink="one", tag="full"),)))
    assert caught.value.path == "capture[0].tag"
    sinks.close()


PROGRAM = """
import sys, weakref
from support.sinking import ORIGIN, delivery
from midstream.sinks.sink_set import SinkSet, Pace
from midstream.config.sinks import plain_sinks, read_sinks

class Engine:
    pass

engine = Engine()
sinks = SinkSet(read_sinks(plain_sinks({"store": {"root": sys.argv[1]}})), ORIGIN)
weakref.finalize(engine, sinks.close)
for nth in range(5):
    sinks.queue("store").put(delivery(f"r{nth}"), 1)
"""


@pytest.mark.engine
def test_what_was_handed_over_is_kept_though_the_program_ends_without_waiting(tmp_path):
    python("-c", PROGRAM, tmp_path / "store", timeout=120, fresh=True)
    found = open_store(tmp_path / "store").requests
    assert [each.request for each in found] == [f"r{nth}" for nth in range(5)]


def test_metadata_have_no_key_that_the_sink_reserves(tmp_path):
    given = {"one": {}, "store": {"root": str(tmp_path)}}
    sinks = opened(given)
    metadata = {"midstream": 1, "label": 2}
    sinks.check(Plan((Capture(0, metadata=metadata), Capture(1, sink="one", metadata=metadata))))
    sinks.check(Plan((Capture(0, sink="store", metadata={"label": 2}),)))
    problem = "the sink 'store' reserves the key 'midstream'"
    with pytest.raises(SpecError, match=problem) as caught:
        sinks.check(Plan((Capture(0), Capture(1, sink="store", metadata=metadata))))
    assert caught.value.path == "capture[1].metadata"
    captures = ServerCaptures(sinks, ModelShape(4, 8, [("resid_post", 1)]))
    with pytest.raises(SpecError, match=problem):
        captures.set("watch", Capture(1, metadata=metadata), "store")
    sinks.close()
    given["store"]["capture"] = {"layers": 1, "metadata": metadata}
    with pytest.raises(ConfigError, match=r"sinks\.store\.capture\.metadata: " + problem):
        ServerCaptures(opened(given), ModelShape(4, 8, [("resid_post", 1)]))


def test_a_layout_is_one_that_the_sink_has(tmp_path):
    sinks = opened({"one": {}, "filesystem": {"root": str(tmp_path), "layout": "packed"}})
    sinks.check(Plan((Capture(0, sink="filesystem", layout="sharded"),)))
    for sink, known in (("filesystem", "per_file"), ("one", "none")):
        with pytest.raises(SpecError, match=f"has no layout 'flat'; known: .*{known}") as caught:
            sinks.check(Plan((Capture(0, sink=sink, layout="flat"),)))
        assert caught.value.path == "capture[0].layout"
    with pytest.raises(SpecError, match="must be omitted for the sink memory"):
        Capture(0, layout="packed")
    with pytest.raises(SpecError, match="differs from the layout"):
        Plan((Capture(0, sink="one", layout="a"), Capture(1, sink="one", layout="b")))
