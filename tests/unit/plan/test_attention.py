"""`Attention`: its forms, and what becomes of it for a model, a prompt and a rank."""

from typing import Any

import pytest
from support.refusals import refused, refused_calls

from midstream import Attention, Capture, Probe, Steer, Text, TokenIds
from midstream.errors import SpecError
from midstream.plan import Entropy, Mass, ModelShape, Plan, Prompt, TopKeys
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.session_rules import check_growing
from midstream.plan.resolve.wire import from_bytes, to_bytes
from midstream.runtime.frontend.request.budget import max_row_bytes, row_sizes
from midstream.runtime.protocol.cache_keys import cache_keys
from midstream.runtime.protocol.segments import WHOLE, RankShare, cut

POST, Q = ("resid_post", 1), ("rot_q", 1)
TAPS = [("resid_post", n) for n in range(4)] + [("rot_q", 0), Q, ("q", 2)]
SHAPE = ModelShape(
    4, 16, TAPS, {("attention", 3): "it is a state"},
    widths=dict.fromkeys(TAPS[4:], 24), heads=dict.fromkeys(TAPS[4:], 6),
)  # fmt: skip
EVERY = [
    Attention(1, reduce=TopKeys(3)),
    Attention([0, -2], [5, 2], [3, "last_prompt"], reduce="full", name="some"),
    Attention("all", "all", "generated", reduce=Entropy(), name="entropy"),
    Attention(1, 0, slice(1, 3), reduce=Mass([0, slice(4, 7)], exclude=5), name="mass"),
]


def resolved(*captures: Any, prompt: Any = 9, max_tokens: int | None = 5) -> Any:
    given = Prompt(prompt) if isinstance(prompt, int) else prompt
    return resolve(Plan.make(list(captures)), SHAPE, given, max_tokens)


def test_other_forms_are_read() -> None:
    for given, expected in (
        ({"layers": [1], "reduce": "entropy"}, Attention(1, reduce=Entropy())),
        ({"layer": 1, "heads": "all", "reduce": {"top_keys": 3}}, EVERY[0]),
        ({"layers": 1, "reduce": {"mass": "prompt"}}, Attention(1, reduce=Mass("prompt"))),
        (
            {"layers": 1, "reduce": {"mass": {"positions": [1], "phase": "prompt"}}},
            Attention(1, reduce=Mass(1, phase="prompt")),
        ),
    ):
        assert Plan.parse({"capture": given}) == Plan.make(expected)


def test_malformed_ones_are_refused_by_field() -> None:
    refused(
        lambda given: Plan.parse({"capture": given}),
        ({"layers": 1, "queries": 3}, "capture", ""),
        ({"reduce": "full"}, "capture", ""),
        ({"layers": 1, "reduce": "ful"}, "capture.reduce", "ful"),
        ({"layers": 1, "reduce": {"top_keys": 0}}, "capture.reduce.top_keys", "0"),
        ({"layers": 1, "reduce": {"top_keys": 1025}}, "capture.reduce.top_keys", "1025"),
        ({"layers": 1, "reduce": {"top_keys": "3"}}, "capture.reduce.top_keys", "str"),
        ({"layers": 1, "reduce": {"mass": "promt"}}, "capture.reduce.mass.positions", "promt"),
        ({"layers": 1, "reduce": {"mass": {"positions": 1, "of": 2}}}, "capture.reduce.mass", "of"),
        ({"layers": 1, "reduce": 7}, "capture.reduce", "int"),
        ({"layers": 1, "reduce": "full", "sites": "z"}, "capture", "sites"),
        ({"layers": 1, "reduce": "full", "queries": [2, "x"]}, "capture.queries[1]", "x"),
        ({"layers": 1, "reduce": "full", "heads": [1, 1]}, "capture.heads", "twice"),
        ({"layers": 1, "reduce": "full", "name": "a b"}, "capture.name", "a b"),
        ({"layers": 1, "reduce": "full", "stream": 1}, "capture.stream", "bool"),
    )


def test_queries_are_read_where_attention_reads_them() -> None:
    plan = resolved(*EVERY, Capture([1], "resid_post"))
    found = {capture.taps: capture.pattern for capture in plan.captures}
    some = found[("attention.some", 0), ("attention.some", 2)]
    assert some.reads == (("rot_q", 0), ("q", 2))
    assert (some.kind, some.size, some.heads, some.counts) == ("full", 64, (2, 5), (2, 2))
    entropy = found[tuple(("attention.entropy", layer) for layer in range(3))]
    assert (entropy.kind, entropy.heads, entropy.counts) == ("entropy", (), (6, 6, 6))
    mass = found[(("attention.mass", 1),)]
    assert (mass.kind, mass.keys, mass.size) == ("mass", ((0, 1), (4, 5), (6, 7)), 1)
    top = found[(("attention", 1),)]
    assert (top.kind, top.size) == ("top", 6)
    assert plan.pattern_widths["attention.some", 2] == 2 * 64
    assert plan.pattern_widths["attention", 1] == 6 * 6
    assert set(plan.read_taps) == {POST, ("rot_q", 0), Q, ("q", 2)}
    assert from_bytes(to_bytes(plan)) == plan
    sizes = row_sizes(plan, SHAPE)
    assert sizes[POST] == 16 * 4
    assert sizes["attention.entropy", 0] == 6 * 4


def test_what_cannot_be_done_is_refused_by_field() -> None:
    refused(
        resolved,
        (Attention(3, reduce="full"), "capture[0].layers", "cannot be read: it is a state"),
        (Attention([0, -4], reduce="full"), "capture[0].layers[1]", "the same as layer 0"),
        (Attention(4, reduce="full"), "capture[0].layers", "out of range"),
        (Attention([1, 2], [6], reduce="full"), "capture[0].heads", "head 6 is out of range"),
        (Attention(1, queries=14, reduce="full"), "capture[0].queries", "14"),
        (Attention(1, queries=[1, 14], reduce="full"), "capture[0].queries[1]", "14"),
        (Attention(1, reduce=Mass(14)), "capture[0].reduce.positions", "14"),
        (
            Attention(1, reduce=Mass("last_row")),
            "capture[0].reduce.positions",
            "before tokens are",
        ),
    )
    full, ids = Attention(1, reduce="full"), Prompt(3, token_ids=(3, 4, 5))
    each = Attention("all", reduce="full")
    assert resolved(Attention(0, reduce="full"), Attention(1, reduce=Entropy())).captures
    refused_calls(
        (
            lambda: resolved(each, Attention(1, reduce=Entropy())),
            "capture[1].name",
            "another `name`",
        ),
        (lambda: Capture.parse(full), "is for single requests"),
        (lambda: resolved(full, prompt=5000), "capture[0].reduce", "at most 4096"),
        (lambda: resolved(full, max_tokens=None), "capture[0].reduce", "any number of keys"),
        (
            lambda: resolved(Attention(1, reduce=Mass(TokenIds([3]))), prompt=ids),
            "capture[0].reduce.positions",
            'phase="prompt"',
        ),
    )


def test_full_patterns_of_early_queries_need_not_know_the_end() -> None:
    one = Attention(1, queries=slice(0, 70), reduce="full")
    (capture,) = resolved(one, prompt=5000, max_tokens=None).captures
    assert capture.pattern.size == 128


def probed(**given: Any) -> Any:
    plan = Plan.make(probes=Probe(**given), edits=Steer([1.0] * 16, 0))
    return resolve(plan, SHAPE, Prompt(9), 5)


def test_a_probe_of_attention_reads_the_queries_and_has_a_column_of_its_own() -> None:
    plan = probed(attention=Mass(slice(0, 4)), layer=-2, heads=[5, 2], name="m")
    (probe,) = plan.probes
    assert (probe.site, probe.layer, probe.tap, probe.slot) == ("attention", 2, ("q", 2), 0)
    pattern = probe.attention.pattern
    assert (pattern.kind, pattern.size, pattern.keys) == ("mass", 1, ((0, 4),))
    assert (pattern.heads, pattern.counts, probe.attention.num_heads) == ((2, 5), (2,), 6)
    assert (plan.slots, plan.read_taps, plan.taps) == (1, (("q", 2),), ())
    assert from_bytes(to_bytes(plan)) == plan
    assert cache_keys(plan).first_read == 0


def test_a_probe_of_what_cannot_be_read_is_refused_by_field() -> None:
    refused(
        lambda given: probed(**{"attention": Entropy(), "layer": 1, **given}),
        ({"layer": 3}, "probes[0].layer", "layer 3 cannot be read: it is a state"),
        ({"layer": 4}, "probes[0].layer", "out of range"),
        ({"head": [1, 6]}, "probes[0].head", "head 6 is out of range"),
        ({"attention": Mass(14)}, "probes[0].attention.positions", "14"),
        (
            {"attention": Mass("last_row")},
            "probes[0].attention.positions",
            "before tokens are",
        ),
        ({"positions": 14}, "probes[0].positions", "14"),
    )


def test_positions_of_a_mass_count_as_the_plans_own() -> None:
    read, probe = Attention(1, queries=3, reduce=Mass(Text("x"))), Mass(Text("x"))
    for plan, path in (
        (Plan.make(read), "capture[0]"),
        (Plan.make(probes=Probe(attention=probe, layer=1)), "probes[0]"),
    ):
        assert plan is not None
        assert plan.needs_prompt
        with pytest.raises(SpecError, match="not complete") as error:
            check_growing(plan, ())
        assert error.value.path.startswith(path)
    check_growing(Plan.make(Attention(1, queries=3, reduce=Mass(slice(0, 4)))), ())


def test_each_rank_has_its_heads_of_a_probe_of_attention() -> None:
    index = {tap: nth for nth, tap in enumerate(TAPS)}
    parts = tuple(3 if site in ("rot_q", "q") else 1 for site, _ in TAPS)
    for heads, expected in (
        ([1, 4, 5], {0: ((1,), 1), 2: ((), 0), 4: ((0, 1), 2)}),
        ("all", {0: ((), 2), 2: ((), 2), 4: ((), 2)}),
    ):
        plan = probed(attention=Entropy(), layer=1, head=heads)
        for rank in range(6):
            pieces = cut(plan, index, RankShare(rank, 6, parts))
            reads = [read for piece in pieces for read in piece.patterns]
            found = [(read.heads, read.num_heads) for read in reads]
            assert found == ([expected[rank]] if rank in expected else [])
            assert all(piece.scored == (rank in expected) for piece in pieces)
        (read,) = cut(plan, index, WHOLE)[0].patterns
        assert read.num_heads == (6 if heads == "all" else 3)


def test_each_rank_makes_the_rows_of_its_heads_and_reads_no_more_than_these() -> None:
    index = {tap: nth for nth, tap in enumerate(TAPS)}
    plan = resolved(Attention(1, queries=slice(2, 5), reduce=TopKeys(3)), Capture([1], "rot_q", 3))
    whole = cut(plan, index, WHOLE)
    middle = next(piece for piece in whole if piece.start == 3)
    assert (middle.taps, middle.captured) == ((index[Q],), (index[Q],))
    assert [read.num_heads for read in middle.patterns] == [6]
    first = next(piece for piece in whole if piece.start == 2)
    assert (first.taps, first.captured) == ((), (index[Q],))
    parts = tuple(3 if site in ("rot_q", "q") else 1 for site, _ in TAPS)
    for rank in range(6):
        found = cut(plan, index, RankShare(rank, 6, parts))
        reads = [read for piece in found for read in piece.patterns]
        # Of two ranks with the same heads, the first makes the rows.
        assert {read.num_heads for read in reads} == (set() if rank % 2 else {2})
        assert any(piece.captured for piece in found) == (rank % 2 == 0)
    assert cut(plan, {POST: 0}, WHOLE)[0].captured == ()


def test_rows_of_attention_count_as_bytes_of_the_rank_that_makes_them() -> None:
    plan = resolved(Attention(1, queries=slice(2, 5), reduce=TopKeys(3)))
    assert max_row_bytes(plan, SHAPE, 13, 1) == 3 * 6 * 6 * 4
    assert max_row_bytes(plan, SHAPE, 13, 3, {Q: 3, ("attention", 1): 3}) == 3 * 2 * 6 * 4
