"""Rows that stay on the device between two requests: they are those that the host path places, bit
for bit, and those of transformers with plain hooks; and they are freed with their results.
"""

import gc
import pickle
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from engine.asking import preempting
from support import adapters, asking_model, engines, reloading
from support.asking_model import HIDDEN, Hooked, placing
from support.engine_view import inspect
from support.refusals import refused
from support.updating import Stepped

from midstream import Capture, Gate, Probe, Replace, Steer
from midstream.errors import BusyError, ReceiptError, SpecError

LENGTH, FROM, INTO, BLOCK, ROOM, CHUNK = 6, 3, 1, 32, 250, 40
SUBJECT, QUESTION = "the parrot sleeps", "What is it thinking of?"
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return asking_model.make(tmp_path_factory.mktemp("asking"))


@pytest.fixture(scope="module")
def hooked(model):
    return Hooked(model)


@pytest.fixture(scope="module")
def llm(model):
    own = {"sites": [*engines.ALL_SITES, "mlp_pre"], "device_rows": ROOM}
    cache = {"enable_prefix_caching": True, "block_size": BLOCK, "num_gpu_blocks_override": 64}
    # A prompt takes several steps, and questions more of these.
    steps = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8}
    # vLLM's kernels of adapters on a GPU take no float32.
    adapted = {} if engines.HAS_GPU else {"enable_lora": True, "max_lora_rank": 8}
    with engines.engine(model, midstream=own, **cache, **steps, **adapted) as made:
        yield made


@pytest.fixture(autouse=True)
def without_blocks(llm):
    assert llm.reset_prefix_cache()
    yield
    assert (left(llm), inspect(llm).leftovers()) == (0, {})


def left(llm):
    """The number of requests whose rows are on the device, as the front end counts them."""
    gc.collect()
    return len(llm._front_end.device_sources)


def params(length=LENGTH, **more):
    from vllm import SamplingParams

    given = {"temperature": 0, "logprobs": 0, "ignore_eos": True, **more}
    return SamplingParams(max_tokens=length, **given)


def captured(llm, texts=SUBJECT, reduce="device", layers=(2, FROM), **more):
    taken = Capture(list(layers), positions="prompt", reduce=reduce, **more)
    outputs = llm.generate(texts, params(1), capture=taken, use_tqdm=False)
    return outputs if isinstance(texts, list) else outputs[0]


def ask(llm, sources, question=QUESTION, layer=FROM, **more):
    given = {"sampling_params": params(), "use_tqdm": False, **more}
    return llm.ask(sources, question, layer, **given)


def answered(outputs):
    """The tokens and log probabilities of each output, with all of their bits."""
    return [
        [(token, step[token].logprob) for token, step in
         zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)]
        for output in outputs
    ]  # fmt: skip


def assert_hooked(output, hooked, rows, question=QUESTION, **how):
    """It is what transformers answers, with the rows put in place by hooks."""
    ids = hooked.prompt(f"Layer: {FROM}\n{' ?' * len(rows)} \n{question}")
    assert output.prompt_token_ids == ids
    where = ids.index(hooked.tokenizer.convert_tokens_to_ids(" ?"))
    tokens, scores = hooked.answer(ids, INTO, placing(rows, where, **how), LENGTH)
    ((found, mine),) = [zip(*answer, strict=True) for answer in answered([output])]
    assert list(found) == tokens
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(scores), **CLOSE)
    assert (output.receipt.status, output.receipt.edited.expected) == ("ok", len(rows))


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize("norm", ["match", None])
def test_an_answer_is_that_of_the_host_path_bit_for_bit_and_of_hooks(llm, hooked, mode, norm):
    source, by_value = captured(llm), captured(llm, reduce="")
    lengths = source.activations["resid_post", FROM][:, 0]
    exact = by_value.activations["resid_post", FROM].double().norm(dim=1).float()
    assert torch.equal(torch.as_tensor(lengths), exact)
    rows = hooked.rows(source.prompt_token_ids, FROM)
    for positions in (None, [7, 2, 5], [4]):
        how = {"mode": mode, "norm": norm, "positions": positions}
        assert llm.reset_prefix_cache()
        (host,) = ask(llm, by_value, **how)
        assert llm.reset_prefix_cache()
        (device,) = ask(llm, source, **how)
        assert answered([device]) == answered([host])
        mine = rows if positions is None else rows[positions]
        assert_hooked(device, hooked, mine, mode=mode, norm=norm)


def test_many_questions_of_one_call_have_each_its_own_rows_and_share_blocks_with_none(llm, hooked):
    texts = [f"{what} {number}" for number in range(6) for what in ("the ship", "a parrot")]
    sources = captured(llm, texts, layers=(FROM,))
    questions = [f"{QUESTION} {number}" for number in range(len(texts))]
    for _ in range(2):  # the second time from the prefix cache
        for output, source, question in zip(
            ask(llm, sources, questions), sources, questions, strict=True
        ):
            assert_hooked(output, hooked, hooked.rows(source.prompt_token_ids, FROM), question)
    start = "You are shown what another run of you computed. Layer: {layer}\n{rows} \n{question}"
    cached = [
        ask(llm, sources[index], template=start)[0].num_cached_tokens for index in (0, 2, 0, 2)
    ]
    assert cached[0] == 0
    assert 0 < cached[1] < cached[2] == cached[3]


def test_rows_are_those_of_a_prompt_in_chunks_and_after_preemptions(llm, hooked):
    text = "ten green bottles were hanging on a wall, and one of them fell down"
    whole = hooked.prompt(text)
    assert len(whole) > CHUNK
    chat = [{"role": "user", "content": text}]
    taken = Capture([FROM], positions="prompt", reduce="device")
    with preempting(llm, 2, 3):
        (source,) = llm.chat([chat], params(4), capture=taken, use_tqdm=False)
    assert source.prompt_token_ids == whole
    rows = hooked.rows(whole, FROM)
    with preempting(llm, 2, 3, 5):
        (output,) = ask(llm, source, positions=range(len(whole)))
    assert_hooked(output, hooked, rows)


@pytest.mark.skipif(engines.HAS_GPU, reason="vLLM's kernels of adapters take no float32")
def test_an_adapter_answers_about_rows_of_the_model(llm, hooked, model, tmp_path_factory):
    from vllm.lora.request import LoRARequest

    folder = adapters.make(model, tmp_path_factory.mktemp("adapter"), seed=5)
    merged = Hooked(model, adapters.merge(model, folder, tmp_path_factory.mktemp("merged")))
    source = captured(llm)
    rows = hooked.rows(source.prompt_token_ids, FROM)
    (output,) = ask(llm, source, lora_request=LoRARequest("oracle", 1, str(folder)))
    assert_hooked(output, merged, rows)
    assert_hooked(ask(llm, source)[0], hooked, rows)


@contextmanager
def crossing(llm):
    """Bytes of each message to the worker, and of what it copies to the host in each step."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    transport = executor.driver_worker.worker.midstream_rpc._session._recorder._transport
    messages, copied = [], []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("collective_rpc", "execute_model"):
            call = getattr(executor, name)

            def counted(*args, call=call, **kwargs):
                messages.append(pickle.dumps((args, kwargs)))
                return call(*args, **kwargs)

            patch.setattr(executor, name, counted)
        ship = transport.ship

        def shipping(parcels, tally, scores):
            for parcel in parcels:
                encoded = parcel.encoded
                units = transport._ring._units[parcel.first : parcel.first + parcel.num_units]
                copied.append((units if encoded is None else encoded).cpu().numpy().tobytes())
            copied.append(tally.cpu().numpy().tobytes())
            return ship(parcels, tally, scores)

        patch.setattr(transport, "ship", shipping)
        yield messages, copied


def test_no_row_crosses_the_host(llm, hooked):
    def crossed(reduce):
        with crossing(llm) as (messages, copied):
            source = captured(llm, reduce=reduce, layers=(FROM,))
            (output,) = ask(llm, source)
        assert output.receipt.edited.expected == len(source.prompt_token_ids)
        return source, messages, copied

    by_value, sent, rows = crossed("")
    data = by_value.activations["resid_post", FROM].numpy()
    units = data / (data.astype("f8") ** 2).sum(1, keepdims=True) ** 0.5
    # 16 bytes within each row, as it is and of length 1.
    parts = [row[8:12].astype("f4").tobytes() for row in (*data, *units)]
    seen = [sum(part in one for one in (*sent, *rows)) for part in parts]
    assert min(sum(seen[: len(data)]), sum(seen[len(data) :])) >= len(data)  # so they are found
    source, messages, copied = crossed("device")
    assert not any(part in one for part in parts for one in (*messages, *copied))
    # Of each row its length, and of each token of a step what was done for it.
    lengths = source.activations["resid_post", FROM].numpy().tobytes()
    assert sum(map(len, copied)) <= sum(map(len, rows)) - data.nbytes + len(lengths)
    assert sum(map(len, messages)) < sum(map(len, sent)) - data.nbytes // 2


def test_rows_stay_as_long_as_their_results_or_a_request_with_them(llm, hooked):
    source = captured(llm)
    assert left(llm) == 1
    rows = hooked.rows(source.prompt_token_ids, FROM)
    (plain,) = ask(llm, source)
    steps = Stepped(llm)
    where = plain.receipt.selected[0].positions[0]
    edit = Steer(rows=source.activations.on_device("resid_post", FROM), layer=INTO, norm="match",
                 positions=slice(*where))  # fmt: skip
    steps.add("asking", plain.prompt_token_ids, params(), edits=[edit])
    steps.step()
    del source
    assert left(llm) == 1
    # Later rows take the places of freed ones, and not of these.
    taken = Capture([FROM], positions="prompt", reduce="device")
    steps.add("other", plain.prompt_token_ids[3:], params(1), capture=taken)
    outputs = steps.finish()
    assert_hooked(outputs["asking"], hooked, rows)
    others = [outputs["other"], captured(llm, "a wall")]
    assert left(llm) == 2
    for other in others:
        mine = hooked.rows(other.prompt_token_ids, FROM)
        assert_hooked(ask(llm, other)[0], hooked, mine)
    del others, other, edit, outputs, steps
    assert left(llm) == 0


def test_rows_of_requests_without_results_are_freed(llm):
    taken = {"capture": Capture([FROM], positions="prompt", reduce="device")}
    for name in ("a", "b"):
        steps = Stepped(llm)
        steps.add(name, range(5, 100), params(20), **taken)
        steps.step()
        assert left(llm) == 1
        llm.llm_engine.abort_request([name])
        steps.step()
        assert left(llm) == 0
    many = Capture("all", positions="prompt", reduce="device")
    with pytest.raises(SpecError, match=r"capture: 380 rows are to stay .* there is room for 250"):
        llm.generate([list(range(5, 100))], params(1), capture=many, use_tqdm=False)
    full = captured(llm, [list(range(5, 100)), list(range(6, 101))], layers=(FROM,))
    refused_by = r"95 rows are to stay on the device, and 190 of 250 are there: drop results"
    with pytest.raises(BusyError, match=refused_by):
        captured(llm, [list(range(7, 102))], layers=(FROM,))
    del full[0]
    assert left(llm) == 1
    assert len(captured(llm, [list(range(7, 102))], layers=(FROM,))) == 1


def test_rows_that_are_gone_are_an_error_that_names_their_request(llm, model, tmp_path):
    source = captured(llm)
    name, edits = source.activations.source.id, {}
    edits["edits"] = Replace(source.activations.on_device("resid_post", FROM, [3]), 0, positions=1)
    source.activations.source.free()
    gone = rf"edits: the rows of request {name} are not on the device any more"
    with pytest.raises(SpecError, match=gone):
        llm.generate(SUBJECT, params(), use_tqdm=False, **edits)
    source = captured(llm)
    reloading.reload(llm, reloading.other_weights(model, tmp_path, 3))
    try:
        name = source.activations.source.id
        with pytest.raises(ReceiptError, match=f"rows of request {name} are of other weights"):
            ask(llm, source)
        source.activations.source.free()
        source = captured(llm)
        assert ask(llm, source)[0].receipt.status == "ok"
    finally:
        source.activations.source.free()  # the log keeps this frame, and with it the results
        reloading.reload(llm, model)


def test_what_cannot_be_done_with_rows_on_the_device_is_refused_by_name(llm):
    source = captured(llm)
    activations = source.activations
    rows = activations.on_device("resid_post", FROM)
    assert activations.on_device("resid_post", FROM, np.array([1, 0])) == (rows[1], rows[0])
    read = Gate(Steer([1.0] * HIDDEN, INTO), rows[0], FROM - 2, 0.5)
    plain = Steer(rows=rows[:2], layer=INTO, positions=[0, 1])
    own = {"layers": [FROM], "positions": "prompt", "reduce": "device"}

    def generate(given, settings=None):
        llm.generate(SUBJECT, settings or params(1), use_tqdm=False, **given)

    refused(
        lambda changed: generate({"capture": Capture(**{**own, **changed})}),
        ({"positions": "all"}, "capture.positions", "of tokens of the prompt"),
        ({"sites": "mlp_pre"}, "capture.sites", "as wide as the residual stream"),
        ({"codec": "full8"}, "codec", "only codec raw"),
        ({"stream": True}, "stream", "only stream=False"),
    )
    refused(
        lambda given: given(),
        (
            lambda: generate({"capture": Capture(**own)}, params(1, n=2, temperature=1)),
            "capture",
            "n is 2",
        ),
        (lambda: llm.steering.set([plain]), "on the device alone"),
        (lambda: llm.vectors.register("row", rows[0]), "on the device alone"),
        (lambda: rows[0].numpy(), "on the device alone"),
        (lambda: plain.to_dict(), "on the device alone"),
        (lambda: generate({"probes": Probe(rows[0], layer=2)}), "probes", "on the device alone"),
        (lambda: generate({"edits": read}), "edits", "on the device alone"),
        (lambda: activations.on_device("resid_post", FROM, [1.5]), "positions", "expected `int`"),
        (lambda: ask(llm, source, positions=99), "positions", "at position 99; there are 0, 1"),
        (lambda: ask(llm, source, layer=1), "layer", "no rows of resid_post at layer 1"),
    )
    for key in (("resid_post", 1), ("mlp_out", FROM)):
        with pytest.raises(KeyError, match="were captured with reduce"):
            source.activations.on_device(*key)
    with pytest.raises(KeyError, match="captured at position 99; there are 0–"):
        activations.on_device("resid_post", FROM, [99])
    steps = Stepped(llm)
    steps.add("first", range(5, 20), params(4), edits=[Steer([1.0] * HIDDEN, INTO)])
    steps.step()
    with pytest.raises(SpecError, match="are for the edits that a request begins with"):
        llm.update("first", edits=[plain])
    steps.finish()
    steps.add("second", range(5, 20), params(4), edits=[plain])
    steps.step()
    llm.update("second", scale=0.5)
    assert steps.finish()["second"].receipt.status == "ok"
    del steps
    copied = pickle.loads(pickle.dumps(source.activations))
    assert copied.source is None
    assert pickle.loads(pickle.dumps(rows)) == rows
