"""Rows of attention of queries in records against keys in a paged cache, and the reductions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from torch import Tensor

from midstream.codecs import Full8, Raw
from midstream.runtime.worker.attention import weights
from midstream.runtime.worker.attention.key_layout import KeyLayout
from midstream.runtime.worker.attention.layers import AttentionLayer
from midstream.runtime.worker.attention.query_run import QueryRun
from midstream.runtime.worker.attention.reader import PatternReader
from midstream.runtime.worker.attention.weights import AttentionForm
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding

SIZE, HEADS, GROUPS, DIM, OTHER = 4, 4, 2, 8, 3
WIDTH = HEADS * DIM
FULL = 32


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
    """Requests of several lengths, whose keys are in blocks in any order; all else is NaN."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.keys = [torch.randn(length, GROUPS, DIM, generator=draw) for length in lengths]
        blocks = [-(-length // SIZE) for length in lengths]
        order = (1 + torch.randperm(sum(blocks), generator=draw)).tolist()
        self.cache = torch.full((1 + sum(blocks), 2, SIZE, GROUPS, DIM), torch.nan)
        self.table = torch.zeros(len(lengths), max(blocks) + 1, dtype=torch.int32)
        for nth, keys in enumerate(self.keys):
            for block in range(blocks[nth]):
                self.table[nth, block] = where = order.pop()
                part = keys[block * SIZE : (block + 1) * SIZE]
                self.cache[where, 0, : len(part)] = part

    def layer(self, form: AttentionForm) -> AttentionLayer:
        strides = (GROUPS * DIM, DIM, 1)
        layout = KeyLayout(0, 0, SIZE, strides, None, GROUPS, DIM, self.cache.dtype)
        module = SimpleNamespace(kv_cache=self.cache)
        key_heads = torch.arange(HEADS) // (HEADS // GROUPS)
        return AttentionLayer(module, 0, layout, form, key_heads)


FORMS = [
    AttentionForm(0.35),
    AttentionForm(0.35, window=5),
    AttentionForm(0.5, soft_cap=1.5, window=3),
    AttentionForm(0.2, slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    AttentionForm(0.2, sinks=torch.tensor([0.0, 2.0, -1.0, 0.5])),
]
RUNS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize("workspace", [1, 1 << 11, 1 << 26])
@given(RUNS, st.sampled_from(FORMS), st.sampled_from([(), (2,), (1, 3)]), st.integers(0, 99))
@settings(max_examples=rounds(suite=25, nightly=300), deadline=None)
def test_rows_are_those_of_each_query_by_itself(workspace, spans, form, heads, seed):
    """Whatever runs a step has, and however little memory at a time."""
    cache = Cache([first + length for first, length in spans], seed)
    ranges = [((0, 1 + nth % 3), (6, None)) for nth in range(len(spans))]
    count = len(heads) or HEADS
    columns = [
        PatternColumns(0, nth, 7, OTHER, WIDTH, kind, size, heads, count)
        for nth, (kind, size) in enumerate(
            [("full", FULL), ("top", 10), ("mass", 1), ("entropy", 1), ("scores", FULL)]
        )
    ]
    encoding = PatternEncoding(Raw(), (), 1, ((0, OTHER),), tuple(columns))
    runs, positions, records = [], [], 0
    for nth, (first, length) in enumerate(spans):
        keys = ((), (), ranges[nth], (), ())
        runs.append(QueryRun(nth, records, length, first, first, keys))
        positions += range(first, first + length)
        records += length
    draw = torch.Generator().manual_seed(seed + 1)
    given_ = torch.randn(records, OTHER + WIDTH + 2, generator=draw)
    reader = PatternReader(lambda tap: cache.layer(form), lambda group: cache.table, workspace)
    data = reader.encode(encoding, given_, torch.tensor(positions), runs)
    assert data.shape == (records, encoding.row_bytes(torch.float32))
    assert torch.equal(data[:, : 4 * OTHER].contiguous().view(torch.float32), given_[:, :OTHER])
    rows = data[:, 4 * OTHER :].contiguous().view(torch.float32)
    scored = [replace(each, slot=nth, divisor=5) for nth, each in enumerate(columns[2:4], 2)]
    scored += [replace(scored[0], count=0, slot=0)]
    own = PatternEncoding(Raw(), (), 1, (), (*columns[:2], *scored))
    places = torch.randperm(records, generator=draw) + 1
    scores = torch.full((records + 2, 5), torch.nan)
    reader.score(own, given_, torch.tensor(positions), runs, places, scores)
    assert not scores[places, 0].any()
    assert scores[:, [1, 4]].isnan().all()
    assert scores[[0, -1]].isnan().all()
    full, top, mass, entropy, before = rows.split([count * each.size for each in columns], 1)
    chosen = list(heads) or list(range(HEADS))
    for run in runs:
        for step in range(run.length):
            at, position = run.record + step, run.position + step
            query = given_[at, OTHER : OTHER + WIDTH].view(HEADS, DIM)
            keys = cache.keys[run.request]
            expected, logits = (each[chosen] for each in naive(query, keys, position, form))
            mine = full[at].view(count, FULL).numpy()
            np.testing.assert_allclose(mine[:, : expected.shape[1]], expected, atol=2e-6)
            assert not mine[:, expected.shape[1] :].any()
            mine = before[at].view(count, FULL).numpy()
            np.testing.assert_allclose(mine[:, : expected.shape[1]], logits, atol=1e-5)
            assert (mine[:, expected.shape[1] :] == -np.inf).all()
            inside = np.zeros(expected.shape[1], bool)
            for start, stop in run.keys[2]:
                inside[start:stop] = True
            np.testing.assert_allclose(mass[at].numpy(), (expected * inside).sum(1), atol=3e-6)
            mean = (expected * inside).sum() / 5
            np.testing.assert_allclose(scores[places[at], 2].numpy(), mean, atol=3e-6)
            logs = np.log(np.where(expected > 0, expected, 1))
            np.testing.assert_allclose(entropy[at].numpy(), -(expected * logs).sum(1), atol=1e-5)
            mean = -(expected * logs).sum() / 5
            np.testing.assert_allclose(scores[places[at], 3].numpy(), mean, atol=1e-5)
            check_top(top[at].view(count, 10), expected)


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
        torch.full((1, 1, 1, 2), torch.nan), torch.tensor([[1]]),
        lambda first, last: torch.ones(1, last - first, 1, 2), 0, 4, torch.tensor([0]), form, 2,
    )  # fmt: skip
    row = weights.softmax(scores, form)
    assert row.isnan().all()
    assert weights.entropy(row).isnan().all()
