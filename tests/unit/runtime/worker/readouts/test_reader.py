"""Rows of attention of queries in records against keys in a paged cache, and the reductions."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from torch import Tensor

from midstream.codecs import Full8, Raw
from midstream.runtime.worker.readouts import weights
from midstream.runtime.worker.readouts.key_layout import KeyLayout
from midstream.runtime.worker.readouts.layers import AttentionLayer
from midstream.runtime.worker.readouts.reader import PatternReader
from midstream.runtime.worker.readouts.tiles import QueryRun
from midstream.runtime.worker.readouts.weights import AttentionForm
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding

SIZE, HEADS, GROUPS, DIM, OTHER = 4, 4, 2, 8, 3
WIDTH = HEADS * DIM
FULL, LAYERS = 32, 3


def naive(query: Tensor, keys: Tensor, position: int, form: AttentionForm) -> list[np.ndarray]:
    """Weights and scores of one query [heads, dim] over its request's keys [keys, groups, dim], by
    loops.
    """
    found, scores = np.zeros((HEADS, len(keys))), np.full((HEADS, len(keys)), -np.inf)
    for head in range(HEADS):
        logits = {}
        for key in range(position + 1):
            if form.window and position - key >= form.window:
                continue
            x = float(query[head].double() @ keys[key, head * GROUPS // HEADS].double())
            x *= form.scale
            if form.soft_cap:
                x = form.soft_cap * np.tanh(x / form.soft_cap)
            if form.slopes is not None:
                x += float(form.slopes[head]) * (key - position)
            logits[key] = x
        total = sum(np.exp(x) for x in logits.values())
        if form.sinks is not None:
            total += np.exp(float(form.sinks[head]))
        for key, x in logits.items():
            found[head, key], scores[head, key] = np.exp(x) / total, x
    return [found, scores]


class Cache:
    """Requests of several lengths, whose keys are in blocks in any order; all else is NaN.

    Attributes:
        keys: of each layer and request, [keys, groups, dim].
        table: the blocks of each request.
    """

    def __init__(self, lengths: list[int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        blocks = [-(-length // SIZE) for length in lengths]
        order = (1 + torch.randperm(sum(blocks), generator=draw)).tolist()
        self.keys: list[list[Tensor]] = []
        self.caches = torch.full((LAYERS, 1 + sum(blocks), 2, SIZE, GROUPS, DIM), torch.nan)
        self.table = torch.zeros(len(lengths), max(blocks) + 1, dtype=torch.int32)
        for nth, count in enumerate(blocks):
            self.table[nth, :count] = torch.tensor([order.pop() for _ in range(count)])
        for cache in self.caches:
            self.keys.append([torch.randn(n, GROUPS, DIM, generator=draw) for n in lengths])
            for nth, keys in enumerate(self.keys[-1]):
                for block in range(blocks[nth]):
                    part = keys[block * SIZE : (block + 1) * SIZE]
                    cache[self.table[nth, block], 0, : len(part)] = part

    def layer(self, nth: int, form: AttentionForm) -> AttentionLayer:
        """A layer, whose products have a scale of their own."""
        cache = self.caches[nth]
        layout = KeyLayout(0, 0, SIZE, (GROUPS * DIM, DIM, 1), None, GROUPS, DIM, cache.dtype)
        key_heads = torch.arange(HEADS) // (HEADS // GROUPS)
        return AttentionLayer(
            SimpleNamespace(kv_cache=cache), 0, layout, of_layer(form, nth), key_heads
        )


def of_layer(form: AttentionForm, nth: int) -> AttentionForm:
    sinks = None if form.sinks is None else form.sinks + nth
    return replace(form, scale=form.scale / (1 + nth), sinks=sinks)


FORMS = [
    AttentionForm(0.35),
    AttentionForm(0.35, window=5),
    AttentionForm(0.5, soft_cap=1.5, window=3),
    AttentionForm(0.2, slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    AttentionForm(0.2, sinks=torch.tensor([0.0, 2.0, -1.0, 0.5])),
]
KINDS = {"full": FULL, "top": 10, "mass": 1, "entropy": 1, "scores": FULL}
RUNS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize(
    "workspace",
    [1 << 11, *(pytest.param(size, marks=pytest.mark.nightly) for size in (1, 1 << 26))],
)
@given(
    RUNS,
    st.sampled_from(FORMS),
    st.sampled_from([(), (2,), (1, 3)]),
    st.permutations(list(itertools.product(range(LAYERS), KINDS))),
    st.integers(0, 99),
)
@settings(max_examples=rounds(suite=20, nightly=300), deadline=None)
def test_rows_are_those_of_each_query_by_itself(workspace, spans, form, heads, order, seed):
    """Whatever runs and layers a step has, and however little memory at a time."""
    cache = Cache([first + length for first, length in spans], seed)
    count = len(heads) or HEADS
    starts = [OTHER + nth * (WIDTH + 1) for nth in range(LAYERS)]
    columns = [
        PatternColumns(0, 0, tap, starts[tap], WIDTH, kind, KINDS[kind], heads, count)
        for tap, kind in (order if seed % 2 else sorted(order, key=lambda one: one[1]))
    ]
    runs, positions, records = [], [], 0
    for nth, (first, length) in enumerate(spans):
        # Of a mass, keys of its own for each layer, or the same for all.
        keys = [((0, 1 + (nth + each.tap * (seed % 3 > 0)) % 3), (6, None)) for each in columns]
        runs.append(QueryRun(nth, records, length, first, first, tuple(keys)))
        positions += range(first, first + length)
        records += length
    draw = torch.Generator().manual_seed(seed + 1)
    given_ = torch.randn(records, starts[-1] + WIDTH + 2, generator=draw)
    reader = PatternReader(lambda tap: cache.layer(tap, form), lambda group: cache.table, workspace)
    slots = [None if each.kind != "mass" else each.tap for each in columns]
    scored = [
        replace(each, slot=slot, divisor=5) for each, slot in zip(columns, slots, strict=True)
    ]
    scored.append(replace(columns[0], kind="entropy", size=1, slot=4, count=0))
    places = torch.randperm(records, generator=draw) + 1
    scores = torch.full((records + 2, 5), torch.nan)
    own = PatternEncoding(Raw(), (), 1, (), tuple(scored))
    reader.score(own, given_, torch.tensor(positions), runs, places, scores)
    assert not scores[places, 4].any()
    assert scores[:, 3].isnan().all()
    assert scores[[0, -1]].isnan().all()
    encoding = PatternEncoding(Raw(), (), 1, ((0, OTHER),), tuple(columns))
    data = reader.encode(encoding, given_, torch.tensor(positions), runs)
    assert data.shape == (records, encoding.row_bytes(torch.float32))
    rows = data.contiguous().view(torch.float32)
    vectors, *found = rows.split([OTHER, *(count * each.size for each in columns)], 1)
    assert torch.equal(vectors, given_[:, :OTHER])
    chosen = list(heads) or list(range(HEADS))
    for run, step in ((one, step) for one in runs for step in range(one.length)):
        at, position = run.record + step, run.position + step
        naives = []
        for tap in range(LAYERS):
            query = given_[at, starts[tap] : starts[tap] + WIDTH].view(HEADS, DIM)
            mine = naive(query, cache.keys[tap][run.request], position, of_layer(form, tap))
            naives.append([each[chosen] for each in mine])
        for nth, each in enumerate(columns):
            weights_, logits = naives[each.tap]
            row = found[nth][at].view(count, each.size)
            check_row(each.kind, row, weights_, logits, run.keys[nth])
            if each.kind == "mass":
                mean = float(row.sum()) / 5
                assert abs(float(scores[places[at], each.tap]) - mean) <= 3e-6


def check_row(kind: str, row: Tensor, weights_: Any, logits: Any, keys: Any) -> None:
    """A row of some heads is the reduction of these weights [heads, keys]."""
    seen = weights_.shape[1]
    logs = np.log(np.where(weights_ > 0, weights_, 1))
    match kind:
        case "full":
            np.testing.assert_allclose(row[:, :seen], weights_, atol=2e-6)
            assert not row[:, seen:].any()
        case "scores":
            np.testing.assert_allclose(row[:, :seen], logits, atol=1e-5)
            assert (row[:, seen:] == -torch.inf).all()
        case "mass":
            inside = np.zeros(seen, bool)
            for start, stop in keys:
                inside[start:stop] = True
            np.testing.assert_allclose(row[:, 0], (weights_ * inside).sum(1), atol=3e-6)
        case "entropy":
            np.testing.assert_allclose(row[:, 0], -(weights_ * logs).sum(1), atol=1e-5)
        case "top":
            check_top(row, weights_)


def check_top(row: Tensor, expected: np.ndarray) -> None:
    ids, values = row[:, :5].contiguous().view(torch.int32).numpy(), row[:, 5:].numpy()
    largest = -np.sort(-np.pad(expected, ((0, 0), (0, 5))), 1)[:, :5]
    np.testing.assert_allclose(values, largest, atol=2e-6)
    assert ((ids >= 0) == (values > 0)).all()
    for head in range(len(ids)):
        named = ids[head][ids[head] >= 0]
        assert len(set(named.tolist())) == len(named)
        np.testing.assert_allclose(expected[head, named], values[head, : len(named)], atol=2e-6)


def test_vectors_in_the_same_records_are_encoded_by_their_codec():
    records = torch.randn(3, 40)
    encoding = PatternEncoding(Full8(), (), 1, ((2, 8), (30, 8)), ())
    out = torch.zeros(3, encoding.row_bytes(torch.float32), dtype=torch.uint8)
    assert encoding.encode_vectors(records, out) == out.shape[1] == 32
    assert torch.equal(out[:, :16], Full8().encode(records[:, 2:10].contiguous()))
    assert torch.equal(out[:, 16:], Full8().encode(records[:, 30:38].contiguous()))


def test_a_row_that_is_not_finite_is_no_number():
    """And no key is named that the query does not see."""
    form = AttentionForm(1.0)
    scores = weights.scores(
        weights.Queries(
            torch.full((1, 1, 1, 2), torch.nan), torch.tensor([[1]]), torch.tensor([0])
        ),
        lambda first, last: torch.ones(1, last - first, 1, 2), range(0, 4, 2), form,
    )  # fmt: skip
    row = weights.softmax(scores[None], None)
    assert row.isnan().all()
    assert weights.entropy(row).isnan().all()
