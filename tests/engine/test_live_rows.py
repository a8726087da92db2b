"""Rows that go from a running engine to a trainer are those of its prompts, each token once."""

import gc

import pytest
import torch
from support.engine_view import inspect
from support.oracle import Oracle
from torch.utils.data import DataLoader
from vllm import SamplingParams

from midstream.errors import BusyError, ReceiptError, SpecError
from midstream.lab.export import saelens_batches
from midstream.lab.jobs import LiveRows
from midstream.lab.jobs.engine import VllmEngine

TAPS = [("resid_post", 2), ("resid_pre", 0), ("resid_post", 0)]
TOLERANCE = 1e-4


def prompts(count, seed=0):
    """Lists of 3 to 40 token ids, all different."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 41, (count,), generator=draw).tolist()
    return [torch.randint(3, 190, (length,), generator=draw).tolist() for length in lengths]


@pytest.fixture(scope="module")
def oracle(tiny_llama):
    return Oracle(tiny_llama, "model.layers", "post_attention_layernorm")


def rows_of(oracle, every, exclude=False):
    """{(position, token id, rounded vectors): vectors [taps, width]} of transformers."""
    return [
        (position, ids[position], torch.stack([values[tap][position] for tap in TAPS]))
        for ids in every
        for values in [oracle.run(ids).values]
        for position in range(int(exclude), len(ids))
    ]


def flat(batches):
    return [
        (int(position), int(token), values)
        for batch in batches
        for position, token, values in zip(
            batch["position"], batch["token_id"], batch["values"], strict=True
        )
    ]


def assert_same(found, wanted):
    """Whether rows are those wanted, in any order, each once."""
    assert len(found) == len(wanted)
    left = list(wanted)
    for position, token, values in found:
        at = next(
            number
            for number, (place, own, vectors) in enumerate(left)
            if (place, own) == (position, token) and (values - vectors).abs().max() < TOLERANCE
        )
        del left[at]
    assert left == []


@pytest.mark.parametrize("exclude", [None, "first"])
def test_every_token_comes_once_with_the_rows_of_transformers(llm, oracle, exclude):
    every = prompts(20)
    live = LiveRows(llm, every, 16, join=TAPS, exclude=exclude, buffer=128, seed=3)
    batches = list(DataLoader(live, batch_size=None))
    sizes = [len(batch["position"]) for batch in batches]
    assert set(sizes[:-1]) == {16}
    assert batches[0]["values"].shape == (16, 3, llm.info.shape.hidden_size)
    wanted = rows_of(oracle, every, exclude is not None)
    assert_same(flat(batches), wanted)
    assert [row[:2] for row in flat(batches)] != [row[:2] for row in wanted], (
        "they are not shuffled"
    )
    # In the order of the prompts, whichever ends first.
    live = LiveRows(llm, every, 7, join=TAPS, exclude=exclude, shuffle=False, buffer=99)
    found = flat(live)
    assert [row[:2] for row in found] == [row[:2] for row in wanted]
    for (*_, values), (*_, vectors) in zip(found, wanted, strict=True):
        assert (values - vectors).abs().max() < TOLERANCE


def test_the_order_depends_on_the_seed_alone(llm):
    every = prompts(30)

    def read(seed, epoch=0):
        live = LiveRows(llm, every, 8, join=TAPS[:1], buffer=64, seed=seed)
        live.set_epoch(epoch)
        return [batch["position"].tolist() + batch["token_id"].tolist() for batch in live]

    first = read(1)
    step = VllmEngine.step
    with pytest.MonkeyPatch.context() as patch:
        # Replies arrive in another order, and later.
        held = []

        def late(engine):
            held.extend(step(engine))
            waiting = len(engine._lines) > 3 and len(held) < 3
            replies, held[:] = ([], held) if waiting else (held[::-1], [])
            return replies

        patch.setattr(VllmEngine, "step", late)
        assert read(1) == first
    assert read(2) != first
    assert read(1, epoch=1) != first


def test_generated_tokens_have_rows_and_texts_are_tokenized(pool, talking_llama):
    from support.engines import engine

    with engine(talking_llama) as talking:
        chats = [[{"role": "user", "content": "Hello"}]]
        live = LiveRows(talking, ["Hi there", *chats], 4, join=["resid_post.1"], max_tokens=4,
                        shuffle=False)  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = [*talking.generate(["Hi there"], params, capture=[1], use_tqdm=False),
                   *talking.chat(chats, params, capture=[1], use_tqdm=False)]  # fmt: skip
        found = flat(live)
        wanted = [
            (position, token, row)
            for output in outputs
            for position, token, row in zip(
                output.activations.positions.tolist(),
                [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1],
                output.activations["resid_post", 1],
                strict=True,
            )
        ]
        assert [row[:2] for row in found] == [row[:2] for row in wanted]
        assert max((a[2][0] - b[2]).abs().max() for a, b in zip(found, wanted, strict=True)) < 1e-4


def test_the_engine_is_not_ahead_by_more_than_the_buffer(llm, monkeypatch):
    every, buffer = prompts(60), 120
    longest = max(map(len, every))
    added, read = [], []
    add = VllmEngine.add

    def counted(engine, record):
        added.append(len(record.prompt.token_ids))
        assert sum(added) - sum(read) <= max(buffer, longest)
        return add(engine, record)

    monkeypatch.setattr(VllmEngine, "add", counted)
    taken = []

    def source():
        for ids in every:
            taken.append(ids)
            yield ids

    for batch in LiveRows(llm, source(), 8, join=TAPS, buffer=buffer):
        read.append(len(batch["position"]))
        assert sum(added) - sum(read) <= buffer
        assert len(taken) <= len(added) + 1, "prompts are read as they are needed"
    assert sum(read) == sum(added) == sum(map(len, every))
    # A prompt longer than the buffer comes alone.
    long = [list(range(3, 103)), *every[:4]]
    added.clear(), read.clear()
    monkeypatch.setattr(VllmEngine, "add", add)
    assert len(flat(LiveRows(llm, long, 8, join=TAPS, buffer=10))) == sum(map(len, long))


@pytest.mark.parametrize("how", ["close", "collect", "error"])
def test_requests_end_with_the_iterator(wide, how):
    llm = wide
    live = iter(LiveRows(llm, prompts(100), 4, join=TAPS, buffer=3000, shuffle=False))
    next(live)
    assert inspect(llm).in_flight()
    with pytest.raises(BusyError, match="have not ended"):
        llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=1), use_tqdm=False)
    if how == "error":
        with pytest.raises(KeyError):
            live.throw(KeyError("of the trainer"))
    elif how == "close":
        live.close()
    del live
    gc.collect()
    assert not inspect(llm).in_flight()
    assert not inspect(llm).leftovers()
    (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=1),
                             capture=[0], use_tqdm=False)  # fmt: skip
    assert output.activations.positions.tolist() == [0, 1]


def test_two_iterators_do_not_take_one_another_s_rows(wide):
    first, second = (
        iter(LiveRows(wide, prompts(60, seed), 4, join=TAPS, buffer=2000, shuffle=False))
        for seed in (1, 2)
    )
    next(first)
    with pytest.raises(BusyError, match="read one LiveRows at a time"):
        next(second)
    assert len(flat(first)) == sum(map(len, prompts(60, 1))) - 4


def test_what_the_engine_refuses_or_loses_reaches_the_trainer(llm, monkeypatch):
    def read(every, **options):
        return list(LiveRows(llm, every, 4, join=TAPS, **options))

    with pytest.raises(SpecError, match=r"prompts\[2\]"):
        read([[5, 6], [7, 8], [9] * 300, [5]], shuffle=False)
    assert not inspect(llm).leftovers()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    with pytest.raises(SpecError, match=r"prompts\[1\]: images, audio and videos are unsupp"):
        read([[5, 6], [{"role": "user", "content": [picture]}]])
    with pytest.raises(SpecError, match=r"prompts\[1\].*at least one token"):
        read([[5, 6], []])

    def broken():
        yield [5, 6, 7]
        raise OSError("the data are gone")

    with pytest.raises(OSError, match="the data are gone"):
        read(broken())
    from midstream.lab.jobs.records import Failed

    monkeypatch.setattr(VllmEngine, "step", lambda engine: [Failed(1, "rows are missing")])
    with pytest.raises(ReceiptError, match=r"prompts\[0\]: rows are missing"):
        read([[5, 6, 7]])
    assert not inspect(llm).leftovers()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("prompts", "Hello", r"prompts: expected a list of prompts, got `str`"),
        ("batch_size", 0, "batch_size: expected"),
        ("buffer", 3, "buffer: expected .*4"),
        ("join", "resid_post.2", "join: expected a list"),
        ("join", [], "join: expected a list"),
        ("join", ["resid_post"], r"join\[0\].*layers"),
        ("join", [("mlp_in", 1)], r"join\[0\].*mlp_in"),
        ("join", [("resid_post", 99)], r"join\[0\].*99"),
        ("join", [("resid_post", 2), "resid_post.2"], r"join\[1\]: resid_post.2 is listed twice"),
        ("join", [("resid_post", [0, 1])], r"join\[0\]: expected one site and layer"),
        ("join", [3], r"join\[0\]: expected a pair of site and layer"),
        ("exclude", "last", 'exclude: expected "first"'),
        ("shuffle", 1, "shuffle: expected `bool`"),
        ("max_tokens", 0, "max_tokens: expected"),
        ("seed", -1, "seed: expected"),
    ],
)
def test_a_malformed_argument_is_refused_before_a_request(llm, field, value, problem):
    known = {"prompts": [[5, 6]], "batch_size": 4, "join": TAPS}
    fields = known | {field: value}
    with pytest.raises(ValueError, match=problem):
        LiveRows(llm, fields.pop("prompts"), fields.pop("batch_size"), **fields)


def test_workers_are_refused(llm, monkeypatch):
    monkeypatch.setattr("midstream.lab.jobs.live.get_worker_info", lambda: object())
    with pytest.raises(SpecError, match="num_workers: expected 0"):
        iter(LiveRows(llm, prompts(3), 4, join=TAPS))


def test_an_sae_trains_from_live_rows(llm, monkeypatch):
    from support import saelens

    every = prompts(150, seed=5)
    live = LiveRows(llm, every, 64, join=[("resid_post", 0)], buffer=1024, drop_last=True)
    sae, losses = saelens.trained(saelens_batches(live), 64, 256, steps=150, batch=64)
    assert losses[-20:].mean() < 0.4 * losses[:5].mean()
    other = LiveRows(llm, prompts(10, seed=6), 1000, join=[("resid_post", 0)], buffer=1000)
    (rows,) = saelens_batches(other, epochs=1)
    assert saelens.explained(sae, rows) > 0.6
    assert not inspect(llm).leftovers()
