"""The sink that writes a store: what was acknowledged is in it, exactly, with whose it is."""

import dataclasses
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.codec_rows import encoded
from support.sinking import ORIGIN, WIDE, WIDE_ORIGIN, WIDTH, activations, delivery
from unit.store.making import entry, write

from midstream.codecs import parse_codec
from midstream.errors import StoreError
from midstream.lab.export import export_npz
from midstream.plan import Capture, Plan, Probe, Steer
from midstream.plan.vectors.vector import Vector
from midstream.results.activations import Activations, with_heads
from midstream.results.media_span import MediaSpan, spans_to_json
from midstream.results.receipt import Captured, Receipt, Selected
from midstream.sinks.store_sink import StoreSink, brief, outline
from midstream.store import open_store
from midstream.store.maintenance.merge import merge

TAPS = (("resid_pre", 0), ("resid_post", 1), ("resid_post", 3))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def sink(root):
    made = StoreSink(str(root))
    made.open(ORIGIN)
    return made


def test_what_was_flushed_is_in_the_store_as_it_came(sink, root):
    rows = activations(TAPS, dtype=torch.float32)
    for nth in range(3):
        result = sink.write(
            delivery(f"r{nth}", tag="v1", metadata={"label": nth}, activations=rows)
        )
    assert len(open_store(root)) == 0
    sink.flush()
    assert result.manifest == {"store": str(root), "request": "r2", "child": 0, "tag": "v1"}
    assert result.paths == (str(root),)
    store = open_store(root)
    assert [(each.request, each.tag) for each in store.requests] == [
        (f"r{n}", "v1") for n in range(3)
    ]
    found = store.find("r1")
    assert found.metadata["label"] == 1
    assert found.prompt_tokens == 3
    stored = found.activations()
    assert sorted(stored) == sorted(TAPS)
    for tap in TAPS:
        assert torch.equal(stored[tap], rows[tap])
        assert stored.positions_of(*tap).tolist() == [0, 2]
        assert stored.token_ids_of(*tap).tolist() == [100, 102]
    assert len(store.shards) == 1
    header = store.shards[0].header
    assert (header.model, header.codec, header.dtype) == ("a/model", "raw", "float32")


@pytest.mark.parametrize("spec", ["raw", "full8"])
def test_rows_of_two_widths_are_in_the_store_as_they_came(root, spec):
    sink, codec = StoreSink(str(root)), parse_codec(spec)
    sink.open(WIDE_ORIGIN)
    plain = activations((WIDE, *TAPS), origin=WIDE_ORIGIN)
    rows = {tap: encoded(codec, value) for tap, value in plain.items()}
    given = Activations(rows, dict.fromkeys(rows, plain.positions), torch.arange(100, 104))
    sink.write(delivery(activations=given))
    sink.flush()
    (shard,) = open_store(root).shards
    assert shard.header.widths == ((WIDE, 12),)
    stored = open_store(root).get("r")
    for tap, value in plain.items():
        assert torch.equal(stored.encoded(*tap), given.encoded(*tap))
        assert (stored[tap] - value).abs().max() < (1 / 255 if spec == "full8" else 1e-9)


def test_completions_of_one_request_are_its_children(sink, root):
    for nth in range(2):
        sink.write(delivery("r", completion=nth, completions=2))
    sink.flush()
    assert [(each.request, each.child) for each in open_store(root).requests] == [
        ("r", 0),
        ("r", 1),
    ]


def test_what_midstream_knows_of_a_request_is_in_its_metadata(sink, root):
    sink.write(delivery())
    sink.flush()
    own = open_store(root).find("r").metadata["midstream"]
    assert own["request_id"] == "7"
    assert own["receipt"]["status"] == "ok"
    assert "request_id" not in own["receipt"], "it is said once"
    assert own["finish_reason"] == "length"
    assert own["plan"]["capture"][0]["sink"] == "store"
    assert not {"prompt", "text"} & set(own), "texts are stored on request only"


def test_texts_are_stored_on_request(root):
    sink = StoreSink(str(root), prompts=True)
    sink.open(ORIGIN)
    sink.write(delivery())
    sink.flush()
    own = open_store(root).find("r").metadata["midstream"]
    assert (own["prompt"], own["text"]) == ("abc", "de")


def test_a_plan_is_stored_without_the_numbers_of_its_vectors():
    vector = [0.5] * WIDTH
    plan = Plan((Capture(1),), (Steer(vector, 1),), (Probe(vector, 1),))
    found = outline(plan)
    digest = Vector.parse(vector).digest
    assert found["edits"][0]["vector"] == {"sha256": digest}
    assert found["capture"] == plan.to_dict()["capture"]
    assert '"f32"' not in str(found)


def test_a_receipt_is_stored_in_brief_and_says_as_much():
    captured = [
        *(Captured("resid_post", layer, 9, 9) for layer in (3, 0, 1, 2, 7)),
        Captured("mlp_out", 0, 9, 9),
        Captured("resid_post", 8, 9, 4),
    ]
    receipt = Receipt(
        "7", 9, 1, tuple(captured), None, selected=(Selected("capture[0]", ((0, 9),)),)
    )
    assert brief(receipt) == {
        "status": "ok",
        "captured": [
            {"site": "resid_post", "layers": [[0, 4], [7, 8]], "expected": 9, "actual": 9},
            {"site": "mlp_out", "layers": [[0, 1]], "expected": 9, "actual": 9},
            {"site": "resid_post", "layers": [[8, 9]], "expected": 9, "actual": 4},
        ],
        "selected": [{"what": "capture[0]", "positions": [[0, 9]]}],
    }
    wrong = dataclasses.replace(receipt, problems=("late",), dropped=2)
    assert brief(wrong)["problems"] == ["late"]
    assert (brief(wrong)["status"], brief(wrong)["dropped"]) == ("error", 2)


def test_rows_of_several_codecs_are_in_shards_of_their_own(sink, root):
    plain = activations(TAPS[:1])
    codec = parse_codec("rp8:k=4")
    tap = TAPS[0]
    coded = encoded(codec, plain[tap])
    reduced = Activations({tap: coded}, {tap: plain.positions}, torch.arange(100, 104))
    sink.write(delivery("raw", activations=plain))
    sink.write(delivery("rp8", activations=reduced))
    sink.flush()
    store = open_store(root)
    assert sorted(shard.header.codec for shard in store.shards) == ["raw", "rp8:k=4,seed=0"]
    assert torch.equal(store.get("rp8")[tap], reduced[tap])
    assert torch.equal(store.get("rp8").encoded(*tap), reduced.encoded(*tap))


def test_a_flush_that_fails_lets_go_of_what_it_had_and_the_next_one_is_well(sink, root):
    sink.write(delivery("lost"))
    os.rename(root, root.with_name("moved"))
    with pytest.raises(StoreError):
        sink.flush()
    root.mkdir(exist_ok=True)
    sink.write(delivery("kept"))
    sink.flush()
    sink.close()
    assert [each.request for each in open_store(root).requests] == ["kept"]


def test_a_request_that_is_held_and_metadata_of_the_stores_own_name_are_errors(sink, root):
    sink.write(delivery("r"))
    with pytest.raises(StoreError, match="added before"):
        sink.write(delivery("r"))
    sink.flush()
    assert len(open_store(root)) == 1
    with pytest.raises(ValueError, match="metadata: the key 'midstream' is reserved"):
        sink.write(delivery(metadata={"midstream": 1}))


SPANS = st.lists(
    st.builds(
        MediaSpan,
        st.sampled_from(["image", "audio", "video"]),
        st.integers(0, 9),
        st.integers(0, 40),
        st.integers(1, 9),
        st.text("0123456789abcdef", max_size=64),
    ),
    max_size=4,
).map(tuple)


@given(prompts=st.lists(SPANS, min_size=1, max_size=3))
def test_a_store_says_where_the_media_of_each_prompt_are(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("media")
    sink, places = StoreSink(str(folder / "store")), range(0, 50, 3)
    sink.open(ORIGIN)
    rows = Activations(
        {tap: torch.zeros(len(places), WIDTH) for tap in TAPS},
        dict.fromkeys(TAPS, torch.tensor(places)),
        torch.arange(50),
    )
    for nth, spans in enumerate(prompts):
        sink.write(delivery(f"r{nth}", activations=with_heads(rows, {}, spans)))
    sink.flush()
    merge([folder / "store"], folder / "merged")
    for store in map(open_store, (folder / "store", folder / "merged")):
        for nth, spans in enumerate(prompts):
            assert store.get(f"r{nth}").positions_of_media == spans
            batch = store.select(layer=3, request=f"r{nth}").take(range(len(places)))
            for place, span in zip(places, batch.media, strict=True):
                wanted = [each for each in spans if each.first <= place < each.first + each.length]
                assert span == (wanted[0] if wanted else None)
    for spans, path in zip(prompts, export_npz(store.select(), folder / "npz"), strict=True):
        assert json.loads((path / "manifest.json").read_text())["media"] == spans_to_json(spans)


SPAN = {"kind": "image", "index": 0, "first": 1, "length": 2}


@pytest.mark.parametrize(
    ("known", "problem"),
    [
        ({"midstream": {"media": [{"kind": "image"}]}}, "metadata: midstream: media .*expected a"),
        ({"midstream": {"media": [{**SPAN, "first": -1}]}}, "expected a JSON list"),
        ({"midstream": {"media": 7}}, "expected a JSON list"),
        ({"midstream": "media", "media": 3}, None),
        ({"midstream": {"media": [{**SPAN, "more": 1}]}}, None),
    ],
)
def test_media_in_metadata_that_others_wrote_are_checked(root, known, problem):
    write(root, [entry("a", metadata=known)])
    if problem is None:
        assert len(open_store(root).get("a").positions_of_media) == (known["midstream"] != "media")
        return
    with pytest.raises(StoreError, match=problem):
        open_store(root).get("a")


def test_a_store_that_cannot_be_written_to_keeps_the_engine_from_starting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        StoreSink(str(tmp_path / "file")).open(ORIGIN)
    with pytest.raises(StoreError, match="dtype"):
        StoreSink(str(tmp_path / "s")).open(dataclasses.replace(ORIGIN, dtype="float8"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"root": ""}, "root: expected the path of a store"),
        ({"root": "x", "shard_bytes": 0}, "shard_bytes: expected a number of bytes, got 0"),
        ({"root": "x", "group_seconds": -1}, "group_seconds: expected 0 to 60"),
        ({"root": "x", "prompts": 1}, "prompts: expected `bool`"),
    ],
)
def test_a_wrong_setting_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        StoreSink(**settings)
