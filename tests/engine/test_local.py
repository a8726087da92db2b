"""Edits by Python functions, against the same functions as hooks in transformers in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cached_pair import fresh
from support.engine_view import inspect
from support.engines import engine, generated, greedy
from support.oracle_edits import EVERY_SITE, At, EditOracle, row_error
from support.updating import Stepped

from midstream import Capture, Local, Scale, Steer
from midstream.errors import ReceiptError, SpecError
from midstream.plan import Plan
from midstream.runtime.vllm.attributes import ENDPOINT

TOLERANCE = 1e-4
SITES = ["resid_pre", "attn_out", "mlp_in", "resid_post"]


@pytest.fixture(scope="module")
def local(tiny_llama: Path) -> Iterator[Any]:
    with engine(
        tiny_llama,
        block_size=32,
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        midstream={"sites": list(EVERY_SITE), "hooks": "local", "reuse_bytes": 1 << 20},
    ) as found:
        yield found


def bend(h: torch.Tensor, info: Any) -> torch.Tensor:
    """Depends on each component, on the site, and on the position and token of each row."""
    by_row = (info.positions % 7 + info.token_ids.cpu() % 5).to(h.dtype)[:, None]
    return torch.tanh(h.flip(-1)) + 0.1 * by_row.to(h.device) + 0.05 * info.layer


def ask(llm: Any, prompt: list[int], count: int = 4, **asked: Any) -> Any:
    params = greedy(count, detokenize=False)
    return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False, **asked)[0]


def assert_as(oracle: EditOracle, prompt: list[int], out: Any, edits: list[At]) -> None:
    """Tokens and all captured rows must be those of transformers with the same functions."""
    one = out.outputs[0] if hasattr(out, "outputs") else out
    tokens = [*prompt, *one.token_ids]
    assert list(one.token_ids) == oracle.generate(prompt, len(one.token_ids), edits)
    seen = oracle.run(tokens[:-1], edits)
    assert len(one.activations)
    for tap in one.activations:
        at = one.activations.positions_of(*tap)
        assert row_error(one.activations[tap], seen.values[tap][at]) < TOLERANCE, tap


@pytest.mark.parametrize("site", EVERY_SITE)
def test_a_function_at_any_site_is_a_hook_there(local, oracle, site):
    prompt = fresh(100)
    edit = Local(bend, 1, site)
    out = ask(local, prompt, edits=edit, capture=Capture("all", list(EVERY_SITE)))
    assert_as(oracle, prompt, out, [At(edit)])
    assert ask(local, prompt).outputs[0].token_ids != out.outputs[0].token_ids
    (called,) = out.receipt.called
    assert (called.name, called.site, called.layer) == (f"{__name__}:bend", site, 1)
    assert (called.expected, called.rows, called.calls) == (103, 103, 5)
    assert out.receipt.edited.applied == 103


def test_it_comes_before_the_other_edits_at_its_site_and_captures_see_all(local, oracle):
    prompt = fresh(40)
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    edits = [Steer(vector, 1, 2.0), Local(bend, 1), Scale(0.5, 1)]
    capture = Capture("all")
    out = ask(local, prompt, edits=edits, capture=capture)
    assert_as(oracle, prompt, out, [At(edits[1]), At(edits[0]), At(edits[2])])


def test_others_in_the_batch_are_not_touched(local, oracle):
    seen: dict[str, list[int]] = {}

    def watch(h: torch.Tensor, info: Any) -> None:
        seen.setdefault(info.request_id, []).extend(info.positions.tolist())

    prompts = [fresh(30 + 9 * nth) for nth in range(6)]
    vector = torch.randn(64, generator=torch.Generator().manual_seed(4))
    edits: list[list[Any]] = [
        [Local(bend, 0, "attn_out")],
        [Steer(vector, 1, 2.0)],
        [Local(bend, [0, 2], positions=slice(5, 33, 2))],
        [Local(bend, 1, "resid_pre", phase="generated")],
        [Local(watch, 1, positions=slice(3, None))],
        [Local(lambda h, info: h * 2.0, 1, "mlp_in", positions=[0, 7])],
    ]
    where = [None, None, range(5, 33, 2), None, range(3, 500), (0, 7)]
    outputs = local.generate(
        [{"prompt_token_ids": one} for one in prompts],
        greedy(5, detokenize=False),
        use_tqdm=False,
        edits=edits,
        capture=Capture("all", SITES),
    )
    for nth, (prompt, out) in enumerate(zip(prompts, outputs, strict=True)):

        def chosen(position: int, nth: int = nth, prompt: list[int] = prompt) -> bool:
            there = where[nth]
            return position >= len(prompt) if nth == 3 else there is None or position in there

        assert_as(oracle, prompt, out, [At(one, chosen) for one in edits[nth]])
    seen.pop("oracle")
    assert [sorted(each) for each in seen.values()] == [list(range(3, 70))]


def test_kv_is_shared_by_requests_with_the_same_function_alone(local, oracle):
    prompt = fresh(100)
    capture = Capture(2, positions=slice(97, None))

    def other(h: torch.Tensor, info: Any) -> torch.Tensor:
        return -h

    plain = ask(local, prompt, capture=capture)
    for fn, hit in ((bend, 0), (other, 0), (bend, 96), (other, 96)):
        edit = Local(fn, 1)
        out = ask(local, prompt, edits=edit, capture=capture)
        assert out.num_cached_tokens == hit
        assert_as(oracle, prompt, out, [At(edit)])
        (called,) = out.receipt.called
        assert called.rows == called.expected - hit == out.receipt.edited.applied
        assert out.receipt.edited.cached == hit
    again = ask(local, prompt, capture=capture)
    assert again.num_cached_tokens == 96
    assert generated(again) == generated(plain)
    # Up to the first position of the function the blocks are those of plain requests.
    late = ask(local, prompt, edits=Local(other, 1, positions=slice(70, None)), capture=capture)
    assert late.num_cached_tokens == 64
    kept = Capture("all", reuse=True)
    for fn, hit in ((bend, 0), (bend, 96), (other, 0)):
        out = ask(local, prompt, edits=Local(fn, 1), capture=kept)
        assert {one.reused for one in out.receipt.captured} == {hit}
        assert_as(oracle, prompt, out, [At(Local(fn, 1))])


def test_a_preempted_request_calls_its_function_again(local, oracle):
    prompt, edit, run = fresh(90), Local(bend, 1), Stepped(local)
    run.add("a", prompt, greedy(8, detokenize=False), edits=edit, capture=Capture("all"))
    for steps in (2, 4):
        run.step(steps)
        assert local.llm_engine.reset_prefix_cache(reset_running_requests=True)
    out = run.finish()["a"].outputs[0]
    assert_as(oracle, prompt, out, [At(edit)])
    (called,) = out.receipt.called
    assert called.rows > called.expected == 97
    assert out.receipt.status == "ok"


def _raises(h: torch.Tensor, info: Any) -> torch.Tensor:
    if 70 in info.positions:
        raise RuntimeError("no more")
    return h


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_raises, "raised RuntimeError: no more"),
        (lambda h, info: h[:-1], r"returned torch.float32 \(63, 64\); expected .*\(64, 64\) or"),
        (lambda h, info: h.double(), "returned torch.float64"),
        (lambda h, info: 3, "returned a int"),
        (lambda h: h, "raised TypeError"),
    ],
)
def test_a_function_that_fails_ends_its_request_alone(local, oracle, fn, reason):
    prompt, beside = fresh(100), fresh(40)
    with pytest.raises(ReceiptError, match=reason) as caught:
        local.generate(
            [{"prompt_token_ids": one} for one in (prompt, beside)],
            greedy(6, detokenize=False),
            use_tqdm=False,
            edits=[[Local(fn, 1, "mlp_in")], [Local(bend, 1)]],
            capture=Capture("all"),
        )
    failed, other = caught.value.outputs
    assert failed.outputs[0].finish_reason == "error"
    assert "edits[0]" in failed.outputs[0].stop_reason
    assert failed.receipt.status == "error"
    assert_as(oracle, beside, other, [At(Local(bend, 1))])
    # Nothing of it is left: not its KV under the function's key, and no row.
    assert ask(local, prompt).num_cached_tokens == 0
    assert not inspect(local).leftovers()


def test_rows_and_kv_of_a_failed_request_are_not_kept(local, oracle):
    prompt = fresh(100)
    fails = [True]

    def fail_once(h: torch.Tensor, info: Any) -> torch.Tensor | int:
        if fails and info.request_id != "oracle" and 64 in info.positions:
            fails.clear()
            return 3
        return -h

    edit, kept = Local(fail_once, 1, "mlp_in"), Capture("all", reuse=True)
    with pytest.raises(ReceiptError, match="returned a int"):
        ask(local, prompt, edits=edit, capture=kept)
    assert ask(local, prompt, edits=edit).num_cached_tokens == 0
    out = ask(local, prompt, edits=edit, capture=kept)
    assert out.num_cached_tokens == 0
    assert {one.reused for one in out.receipt.captured} == {0}
    assert_as(oracle, prompt, out, [At(edit)])


def test_a_function_that_was_not_called_is_noticed(local):
    core = local.llm_engine.engine_core.engine_core
    buffers = ENDPOINT.get(core.model_executor.driver_worker.worker)._rank.buffers
    before, buffers.before = buffers.before, None
    try:
        with pytest.raises(ReceiptError, match=r"resid_post of layer 1.*was not called"):
            ask(local, fresh(20), edits=Local(bend, 1))
    finally:
        buffers.before = before


@pytest.mark.parametrize("hooks", ["off", "local"])
def test_an_engine_with_functions_runs_eagerly(local, tiny_llama, hooks):
    from vllm import EngineArgs

    settings = {"midstream": {"hooks": hooks}}
    args = EngineArgs(
        str(tiny_llama), skip_tokenizer_init=True, max_model_len=256, additional_config=settings
    )
    config = args.create_engine_config()
    assert config.model_config.enforce_eager == (hooks == "local")
    assert not args.enforce_eager


def test_functions_are_rejected_where_they_could_not_run(local, llm):
    prompt = fresh(10)
    with pytest.raises(SpecError, match=r'edits.*hooks": "local"'):
        ask(llm, prompt, edits=Local(bend, 1))
    with pytest.raises(SpecError, match="a function is given with each request"):
        local.steering.set(base=[Local(bend, 1)])
    with pytest.raises(SpecError, match=r"op: functions run only where they are given in Python"):
        Plan.parse(Plan.make(edits=Local(bend, 1)).to_dict())
    with pytest.raises(SpecError, match="fn: expected a function"):
        Local(3, 1)
    from midstream import TokenIds

    with pytest.raises(SpecError, match="a function cannot be called by what is generated"):
        ask(local, prompt, edits=Local(bend, 1, positions=TokenIds([5, 6])))
