"""Rows are chosen by what they are of, where they are and which their tokens are, in one order."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from unit.store.making import TAPS, entry, header, rows_of, same, vectors, write

from midstream import Image, Role, Span, Text, TokenIds, Window, open_store
from midstream.errors import StoreError
from midstream.plan import Positions
from midstream.store import Entry


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two shards; request i has i + 2 rows at 0 …, its prompt is all but the last two of them."""
    root = tmp_path_factory.mktemp("store")
    for numbers in (range(3), range(3, 6)):
        parts = {i: {"prompt_tokens": i, "child": i % 2, "tag": "xy"[i % 2]} for i in numbers}
        write(root, [entry(f"r{i}", rows=i + 2, seed=10 * i, **part) for i, part in parts.items()])
    return open_store(root)


def rows_in(batch):
    places = batch.request, batch.position.tolist()
    return list(zip(batch.site, batch.layer.tolist(), *places, strict=True))


def chosen(selection):
    """[(site, layer, request, position)] of all rows, read in batches."""
    return [row for batch in selection.batches(5) for row in rows_in(batch)]


def every():
    return [
        (site, layer, f"r{i}", position)
        for site, layer in TAPS
        for i in range(6)
        for position in range(i + 2)
    ]


def prompt(row):
    return int(row[2][1:])


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_batches_have_every_row_once_whatever_their_size(store, size):
    batches = list(store.select().batches(size))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert sum(len(batch) for batch in batches) == len(every())
    values = torch.cat([batch.values for batch in batches])
    wanted = [vectors(10 * i + n, i + 2, header()) for n in range(len(TAPS)) for i in range(6)]
    assert same(values, torch.cat(wanted))


def test_a_batch_has_all_that_is_known_of_its_rows(store):
    batch = store.select(site="post_block", layer=0, request="r4").take([3, 0])
    assert len(batch) == 2
    assert same(batch.values, vectors(41, 6, header())[[3, 0]])
    assert same(batch.encoded, batch.values.view(torch.uint8))
    assert batch.position.tolist() == [3, 0]
    assert batch.token_id.tolist() == [31, 1]
    assert batch.layer.tolist() == [0, 0]
    assert batch.child.tolist() == [0, 0]
    assert (batch.site, batch.request, batch.tag) == (["resid_post"] * 2, ["r4"] * 2, ["x"] * 2)
    assert batch.numpy().dtype == np.float32
    assert repr(batch) == "Batch(2 rows)"


@given(data=st.data())
def test_take_gives_the_rows_of_these_indices_in_their_order(store, data):
    selection = store.select(layer=0)
    indices = data.draw(st.lists(st.integers(0, len(selection) - 1), max_size=20))
    rows = every()
    batch = selection.take(indices)
    assert rows_in(batch) == [rows[i] for i in indices]
    for value, i in zip(batch.values, indices, strict=True):
        site, layer, request, position = rows[i]
        number = int(request[1:])
        made = vectors(10 * number + TAPS.index((site, layer)), number + 2, header())
        assert same(value, made[position])


def test_indices_beyond_the_selection_are_refused(store):
    selection = store.select(request="r0")
    for wrong in ([6], [-1], torch.tensor([0, 99])):
        with pytest.raises(IndexError, match="expected indices from 0 to 5"):
            selection.take(wrong)
    with pytest.raises(StoreError, match="expected one dimension"):
        selection.take([[1]])
    mask = np.arange(len(selection)) == 2
    for wrong in (mask, torch.from_numpy(mask), mask.tolist()):
        with pytest.raises(StoreError, match="indices: expected integers, got bool; of a mask"):
            selection.take(wrong)
    for wrong in ([1.5], ["1"], torch.tensor([1.0])):
        with pytest.raises(StoreError, match="indices: expected integers, got "):
            selection.take(wrong)
    assert len(selection.take([])) == 0
    assert selection.take(np.flatnonzero(mask)).position.tolist() == [0]
    for size, got in ((0, "got 0"), (2.5, "got `float`"), (True, "got `bool`")):
        with pytest.raises(StoreError, match=f"size: expected an `int` of at least 1, {got}"):
            selection.batches(size)


@pytest.mark.parametrize(
    ("asked", "keep"),
    [
        ({"site": "resid_pre"}, lambda row: row[0] == "resid_pre"),
        ({"site": ["pre_attn", "resid_post"]}, lambda row: True),
        ({"layer": 3}, lambda row: row[1] == 3),
        ({"layer": [3, 0]}, lambda row: True),
        ({"layer": range(1, 9)}, lambda row: row[1] == 3),
        ({"layer": slice(1, None)}, lambda row: row[1] == 3),
        ({"layer": slice(None, None, 2)}, lambda row: row[1] == 0),
        ({"layer": range(2, 10**15)}, lambda row: row[1] == 3),
        ({"request": []}, lambda row: False),
        ({"token": range(31, 0, -20)}, lambda row: row[3] in (1, 3)),
        ({"token": range(2, 1 << 31)}, lambda row: row[3] > 0),
        ({"request": "r1"}, lambda row: row[2] == "r1"),
        ({"request": ("r5", "r2")}, lambda row: row[2] in ("r5", "r2")),
        ({"tag": "y"}, lambda row: prompt(row) % 2 == 1),
        ({"child": 0}, lambda row: prompt(row) % 2 == 0),
        ({"tag": "y", "request": ["r1", "r2"], "layer": 3}, lambda row: row[1:3] == (3, "r1")),
        ({"model": "acme/tiny", "codec": "raw"}, lambda row: True),
    ],
)
def test_what_is_asked_for_by_name_is_chosen(store, asked, keep):
    assert chosen(store.select(**asked)) == [row for row in every() if keep(row)]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"site": "mlp_out"}, "site: no rows in this store have 'mlp_out'; known: 'resid_post'"),
        ({"site": "resid_pots"}, "'resid_pots' .did you mean `resid_post`"),
        ({"layer": 1}, "layer: no rows in this store have 1; known: 0, 3"),
        ({"layer": -1}, "layer: no rows in this store have -1"),
        ({"layer": slice(-2, None)}, "layer: expected a slice with bounds from 0"),
        ({"layer": slice(0, 3, 0)}, "layer: expected a slice with a step other than 0"),
        ({"layer": "0"}, "layer: expected `int` within .*, or a list or range of them, got `str`"),
        ({"token": 2**70}, "token: expected `int` within .*, got an integer of 71 bits"),
        (
            {"request": ["r1", "r9"]},
            "request: no rows in this store have 'r9'; known: 'r0', 'r1'",
        ),
        ({"tag": "z"}, "tag: no rows in this store have 'z'"),
        ({"token": "x"}, "token: expected `int` within .*, or a list or range of them, got `str`"),
        ({"position": "last_row"}, "position: 'last_row' cannot be determined"),
        ({"position": Text("x")}, "position: Text.'x'. cannot be determined"),
        ({"position": [0, Role("user")]}, "position: Role.* cannot be determined"),
        ({"position": Image(0)}, "position: Image.0. cannot be determined"),
    ],
)
def test_what_is_not_there_is_refused_by_name(store, asked, problem):
    with pytest.raises(StoreError, match=problem):
        store.select(**asked)


@pytest.mark.parametrize(
    ("position", "keep"),
    [
        (0, lambda p, n: p == 0),
        (-1, lambda p, n: p == n - 1),
        ([0, -2], lambda p, n: p in (0, n - 2)),
        (range(1, 6, 2), lambda p, n: p in (1, 3, 5)),
        (slice(2, None), lambda p, n: p >= 2),
        (slice(-2, None), lambda p, n: p >= max(0, n - 2)),
        (Span(-3, None, 2), lambda p, n: p >= max(0, n - 3) and (p - max(0, n - 3)) % 2 == 0),
        (Window(-1, 1), lambda p, n: n - 1 <= p < n + 1),
        ("all", lambda p, n: True),
        ("prompt", lambda p, n: p < n),
        ("generated", lambda p, n: p >= n),
        ("last_prompt", lambda p, n: p == n - 1),
        (Positions(slice(0, None), phase="prompt", exclude=0), lambda p, n: 0 < p < n),
        (Positions("all", phase="generated", exclude=Window(0, 1)), lambda p, n: p > n),
        ([TokenIds([1, 31]), 2], lambda p, n: p in (0, 2, 3)),
    ],
    # Of the lambdas, whose text is another in each process, pytest makes its own.
    ids=lambda value: None if callable(value) else str(value),
)
def test_positions_are_those_that_a_capture_would_mean(store, position, keep):
    assert chosen(store.select(position=position)) == [
        row for row in every() if keep(row[3], prompt(row))
    ]


def test_positions_and_tokens_that_are_not_there_choose_nothing(store):
    selection = store.select(position=99)
    assert len(selection) == 0
    assert list(selection.batches(3)) == []
    assert selection.take([]).values.shape[0] == 0
    assert selection.taps == ()
    assert repr(selection) == "Selection(no rows)"
    assert len(store.select(token=5)) == 0


@settings(max_examples=rounds(suite=25, nightly=1000))
@given(data=st.data())
def test_any_filter_chooses_what_it_says_of_any_store(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("any")
    head = header(hidden_size=1, dtype="float32")
    kept = []
    for i in range(data.draw(st.integers(1, 4))):
        taps = {}
        length = data.draw(st.integers(0, 8))
        for tap in data.draw(st.lists(st.sampled_from(TAPS), unique=True)):
            where = sorted(data.draw(st.sets(st.integers(0, 12), max_size=6)))
            tokens = [data.draw(st.integers(0, 3)) for _ in where]
            values = torch.tensor([[100.0 * i + p] for p in where]).reshape(-1, 1)
            taps[tap] = rows_of(values, head, where, tokens)
            kept += [
                (tap[1], tap[0] == "resid_post", i, p, length, token)
                for p, token in zip(where, tokens, strict=True)
            ]
        write(root, [Entry(request=str(i), prompt_tokens=length, taps=taps)], head)
    start, stop, token = (data.draw(st.integers(0, 12)) for _ in range(3))
    selection = open_store(root).select(
        position=slice(start, start + stop + 1), token=[token % 4, (token + 1) % 4]
    )
    wanted = [
        row
        for row in sorted(kept)
        if start <= row[3] <= start + stop and row[5] in (token % 4, (token + 1) % 4)
    ]
    values = [value for batch in selection.batches(3) for value in batch.values.flatten().tolist()]
    assert values == [100.0 * row[2] + row[3] for row in wanted]


def test_rows_of_different_kinds_do_not_go_into_one_tensor(tmp_path):
    write(tmp_path, [entry("a")])
    wide = header(hidden_size=16, model="acme/wide")
    write(tmp_path, [entry("b", head=wide)], wide)
    sketch = header(codec="full8")
    write(tmp_path, [entry("c", head=sketch)], sketch)
    store = open_store(tmp_path)
    assert store.models == ("acme/tiny", "acme/wide")
    assert store.codecs == ("full8", "raw")
    with pytest.raises(StoreError, match="raw of 8 bfloat16 .acme.tiny.; raw of 16 bfloat16"):
        store.select()
    with pytest.raises(StoreError, match="select one kind by `model` or `codec`"):
        store.select(model="acme/tiny")
    assert next(store.select(model="acme/wide").batches(1)).values.shape == (1, 16)
    assert next(store.select(model="acme/tiny", codec="raw").batches(1)).values.shape == (1, 8)
    assert next(store.select(codec="full8").batches(1)).values.dtype == torch.float32
    assert len(store.select(request=["c"])) == 9
    assert same(store.get("b")[TAPS[0]], vectors(0, 3, wide))


def test_a_store_says_what_is_in_it(store, tmp_path):
    assert store.sites == ("resid_pre", "resid_post")
    assert store.layers == (0, 3)
    assert store.nbytes == sum(shard.size for shard in store.shards)
    assert len(store) == 6
    assert ("r1", 1) in store
    assert "r1" not in store, "its only completion is 1"
    assert "r0" in store
    assert repr(store) == (
        f"Store({store.root!r}, 6 requests; resid_pre, resid_post; 2 layers; raw; "
        f"{store.nbytes / 1e6:.1f} MB in 2 shards)"
    )
    assert repr(store.requests[1]) == "StoredRequest('r1', child=1, tag='y', 3 taps)"
    assert repr(store.select()) == "Selection(81 rows of 8, raw; 3 taps, 2 shards)"
    assert repr(store.shards[0]).endswith("3 requests)")


def test_requests_and_children_that_are_not_there_are_refused_by_name_and_a_close_one_is_hinted_at(
    store, monkeypatch
):
    with pytest.raises(StoreError, match=r"store\d+: there is no request 'r7'"):
        store.get("r7")
    with pytest.raises(StoreError, match="there is no completion 0 of request 'r1'"):
        store.get("r1")
    with pytest.raises(StoreError, match="there is no completion 0 of request 'r0' in elsewhere"):
        store.get("r0", shard="elsewhere")
    wrong = f"{store.requests[0].request}x"
    with pytest.raises(StoreError, match="did you mean"):
        store.get(wrong)
    monkeypatch.setattr("midstream.validation._HINTED", 1)
    with pytest.raises(StoreError, match="there is no request") as error:
        store.get(wrong)
    assert "did you mean" not in str(error.value)


def test_a_request_that_was_stored_twice_is_listed_twice_and_found_by_its_shard(tmp_path):
    for seed in (0, 50):
        write(tmp_path, [entry("a", seed=seed), entry(f"b{seed}")])
    store = open_store(tmp_path)
    assert [each.request for each in store.requests] == ["a", "b0", "a", "b50"]
    with pytest.raises(StoreError, match="request 'a' was stored 2 times, in .*; choose one by"):
        store.get("a")
    first, _, second, _ = store.requests
    assert same(store.get("a", shard=first.shard)[TAPS[0]], vectors(0, 3, header()))
    assert same(store.get("a", shard=second.shard)[TAPS[0]], vectors(50, 3, header()))
    assert same(second.activations()[TAPS[0]], vectors(50, 3, header()))
    assert len(store.select(request="a", layer=3)) == 6


def test_a_selection_goes_to_another_process(store):
    selection = pickle.loads(pickle.dumps(store.select(layer=3)))
    assert chosen(selection) == [row for row in every() if row[1] == 3]


def test_more_shards_than_files_may_be_open_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.store.backends.local._MAX_MAPPED", 2)
    for i in range(6):
        write(tmp_path, [entry(str(i), seed=i)])
    store = open_store(tmp_path)
    for _ in range(2):
        for i in range(6):
            assert same(store.get(str(i))[TAPS[0]], vectors(i, 3, header()))
    assert len(chosen(store.select())) == 6 * 9


def test_rows_that_are_not_read_are_not_looked_at(tmp_path):
    head = header(hidden_size=4096)
    write(tmp_path, [entry(str(i), rows=100, head=head, seed=i) for i in range(3)], head)
    (path,) = tmp_path.iterdir()
    store = open_store(tmp_path)
    (shard,) = store.shards
    with path.open("r+b") as file:  # rows of the first tap, of the last request
        file.seek(shard.head_bytes + 20 * 300 + 8192 * 250)
        file.write(b"\xff" * 64)
    assert same(store.get("0")[TAPS[0]], vectors(0, 100, head))
    assert same(store.get("2")[TAPS[1]], vectors(3, 100, head))
    with pytest.raises(
        StoreError, match=f"{path.name}: damaged: g0.resid_pre.0 does not match its checksum"
    ):
        _ = store.get("2")[TAPS[0]]
    selection = store.select(site="resid_pre", layer=0)
    assert len(selection.take(range(200)).values) == 200
    with pytest.raises(StoreError, match="damaged: g0.resid_pre.0"):
        _ = selection.take([0, 250]).values
