"""The setting `sinks`, in every form, and sinks made from it."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.refusals import refused
from support.sinking import Noting

from midstream.config.sinks import QUEUE_BYTES, plain_sinks, read_sinks
from midstream.errors import ConfigError
from midstream.plan import Capture
from midstream.sinks import Sink
from midstream.sinks import registry as finding
from midstream.sinks.files import FileSink
from midstream.sinks.registry import make_sink

HERE = {"filesystem": {"root": "/srv/acts"}}


def test_every_form_says_the_same():
    for given in (
        HERE,
        {"filesystem": {"root": Path("/srv/acts")}},
        {"filesystem": "root=/srv/acts"},
        "filesystem:root=/srv/acts",
        ["filesystem:root=/srv/acts"],
        ("filesystem:root=/srv/acts",),
    ):
        assert plain_sinks(given) == HERE, given


def test_a_sink_in_one_word_may_have_several_settings_numbers_among_them():
    word = "store:root=/srv/a,b=c/d,bytes=1048576,note=a:b,flag=true"
    settings = {"root": "/srv/a", "b": "c/d", "bytes": 1048576, "note": "a:b", "flag": True}
    assert plain_sinks(["log", word]) == {"log": {}, "store": settings}
    assert plain_sinks("store:root=/srv/a,B/c") == {"store": {"root": "/srv/a,B/c"}}


def test_a_capture_of_every_request_goes_to_its_sink():
    one = {"layers": [1]}
    for capture in (one, Capture(1), Capture(1, sink="log"), [{**one, "sink": "log"}]):
        (found,) = read_sinks(plain_sinks({"log": {"capture": capture, "level": "debug"}}))
        assert found.captures == (Capture(1, sink="log"),)
        assert (found.own, found.queue_bytes) == ({"level": "debug"}, QUEUE_BYTES)


def test_settings_are_plain_json_that_reads_back_the_same():
    plain = plain_sinks({"log": {"capture": [{"layers": "all", "tag": "t"}], "queue_bytes": 7}})
    again = plain_sinks(json.loads(json.dumps(plain)))
    assert again == plain
    (found,) = read_sinks(again)
    assert (found.queue_bytes, found.captures[0].tag) == (7, "t")


def test_memory_takes_a_capture_and_nothing_else():
    (found,) = read_sinks(plain_sinks({"memory": {"capture": {"layers": [0]}}}))
    assert found.captures == (Capture(0),)
    with pytest.raises(ConfigError, match=r"sinks.memory: the only setting is `capture`"):
        plain_sinks({"memory": {"root": "x"}})


def test_what_is_wrong_is_refused_by_name():
    refused(
        plain_sinks,
        (7, r"sinks: expected {sink: settings} or `name:setting=value`, such as .*, got 7"),
        ([7], r"sinks: expected `name:setting=value`, such as store:root=acts, got 7"),
        (
            "store:root",
            r"sinks: expected `name:setting=value`, such as store:root=acts, got 'store:root'",
        ),
        ("store:=x", r"sinks: expected `name:setting=value`"),
        ("store:root=a,root=b", r"sinks.store.root: given twice"),
        (["log", "log:level=debug"], "sink 'log' is configured twice"),
        ({"../x": {}}, "sink name: expected 1 to 128"),
        ({3: {}}, "sink name: expected `str`"),
        ({"log": 7}, r"sinks.log: expected a dict of settings, got 7"),
        ({"log": {"x": object()}}, r"sinks.log: settings must be JSON values"),
        ({"log": {"queue_bytes": 0}}, r"sinks.log.queue_bytes: expected at least 1, got 0"),
        ({"log": {"queue_bytes": True}}, r"sinks.log.queue_bytes"),
        ({"log": {"capture": {"layrs": 1}}}, r"sinks.log.capture: unknown field 'layrs'"),
        ({"log": {"capture": [{"layers": "al"}]}}, r"sinks.log.capture\[0\].layers: "),
        ({"log": {"capture": {"layers": 1, "sink": "npz"}}}, r"log.capture.sink: must be omitted"),
        ({"memory": {"capture": {"layers": 1, "stream": True}}}, "capture.stream: must be omitted"),
        ({"log": {"capture": {"layers": 1, "request_id": "r"}}}, "capture.request_id: must be"),
        error=ConfigError,
    )


def made(given: object) -> list[Sink]:
    return [make_sink(each) for each in read_sinks(plain_sinks(given))]


def test_a_builtin_sink_is_made_of_its_settings(tmp_path):
    root = tmp_path / "not made yet"
    sinks = made({"npz": {"root": str(root)}, "filesystem": {"root": str(root)}})
    assert [type(each) for each in sinks] == [FileSink, FileSink]
    assert not root.exists(), "settings are only checked"


def test_a_sink_that_cannot_be_made_is_refused_by_name():
    refused(
        made,
        ("npz", r"sinks.npz: missing a required argument: 'root'; the sink takes root"),
        ("log:lvl=debug", "unexpected keyword argument 'lvl'; the sink takes level"),
        ("log:level=loud", r"sinks.log: level: expected one of debug"),
        ("nps:root=x", r"sinks.nps: unknown sink; known: filesystem, log, memory, npz"),
        error=ConfigError,
    )


def offer(monkeypatch, name, value):
    found = [EntryPoint(name, value, finding.GROUP)]
    monkeypatch.setattr(finding, "entry_points", lambda group: found)


def test_a_package_offers_a_sink_by_an_entry_point(monkeypatch):
    offer(monkeypatch, "noting", "support.sinking:Noting")
    (sink,) = made("noting")
    assert type(sink) is Noting
    with pytest.raises(ConfigError, match=r"sinks.noting: .*'x'; the sink takes no settings"):
        made("noting:x=1")
    with pytest.raises(ConfigError, match="known: filesystem, .*noting"):
        made("nothing")


def test_what_is_offered_must_be_a_sink_with_a_name_of_its_own(monkeypatch):
    for name, value, problem in (
        ("noting", "delivery", "is not a subclass of midstream.sinks.Sink"),
        ("log", "Noting", "support.sinking:Noting has the name of a built-in sink"),
    ):
        offer(monkeypatch, name, f"support.sinking:{value}")
        with pytest.raises(ConfigError, match=problem):
            made(name)


class Own(Noting):
    """A sink that no entry point names."""

    def __init__(self, level: int = 1) -> None:
        super().__init__()
        self.level = level


PATH = f"{__name__}:Own"


def test_a_class_by_its_path_is_a_sink():
    for given, level in (
        (PATH, 1),
        ({"class": PATH}, 1),
        ({"class": PATH, "level": 3}, 3),
        (f"class={PATH},level=3", 3),
    ):
        plain = plain_sinks({"mine": given})
        assert json.loads(json.dumps(plain)) == plain, given
        sink = make_sink(read_sinks(plain)[0])
        assert (type(sink).__name__, sink.level) == ("Own", level)
        (same,) = read_sinks(plain_sinks(f"mine:class={PATH}"))
        assert type(make_sink(same)) is type(sink)


def test_an_object_is_a_sink_with_captures_and_limits_like_any_other():
    own = Own()
    for given in (own, {"instance": own, "capture": Capture(1), "queue_bytes": 7}):
        plain = plain_sinks({"mine": given})
        again = plain_sinks(json.loads(json.dumps(plain)))
        (read,) = read_sinks(again)
        assert make_sink(read) is own
    assert (read.captures, read.queue_bytes) == ((Capture(1, sink="mine"),), 7)


def test_other_classes_and_objects_are_rejected():
    refused(
        lambda given: make_sink(read_sinks(plain_sinks(given))[0]),
        ({"mine": {"class": "os"}}, "sinks.mine.class: expected `package.module:Class`, got 'os'"),
        ({"mine": {"instance": Own(), "level": 3}}, "sinks.mine.instance: .* takes no level"),
        ({"mine": {"instance": "Own-1"}}, "made in this process, got 'Own-1'"),
        ({"log": {"instance": ""}}, "sinks.log.instance: .* made in this process, got ''"),
        ({"log": {"instance": None}}, "sinks.log.instance: expected a sink, .* got None"),
        ({"mine": {"instance": 5}}, "sinks.mine.instance: expected a sink, which has .* got 5"),
        ({"log": {"class": None}}, "sinks.log.class: expected `package.module:Class`, got None"),
        ({"mine": "nowhere_at_all:Class"}, "sinks.mine.class: .*No module named"),
        ({"mine": "os:Class"}, "os:Class cannot be imported"),
        ({"mine": "os:system"}, "not a subclass of midstream.sinks.Sink"),
        ({"mine": open}, "midstream.sinks.mine: expected a dict of settings"),
        ({"log": PATH}, "sinks.log: the name of a built-in sink"),
        ({"store": Own()}, "sinks.store: the name of a built-in sink"),
        error=ConfigError,
    )
