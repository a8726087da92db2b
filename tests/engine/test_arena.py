"""Captured rows on their way to the caller: codecs, shared memory, and too little of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, greedy, tokens

from midstream import Capture
from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.runtime.worker import result_buffer as results
from midstream.transport.reader import MappedArena

EVERYTHING = Capture(layers="all", sites=ALL_SITES)
PROMPTS = [list(range(3 + n, 90 + 2 * n)) for n in range(12)]
CODECS = ["raw", "cast:dtype=float8_e4m3fn", "full8", "rp8:k=16,seed=3", "topk8:k=8"]


@pytest.fixture(autouse=True)
def _all_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it is."""
    monkeypatch.setattr(results, "LEASED_BYTES", 1)


def run(llm: Any, prompts: list[list[int]], capture: Any = EVERYTHING, count: int = 4) -> list[Any]:
    asked = [tokens(prompt) for prompt in prompts]
    return llm.generate(asked, greedy(count, detokenize=False), capture=capture, use_tqdm=False)


def arena(llm: Any) -> dict[str, int]:
    """How much the worker has."""
    return inspect(llm).arena_used()


_ALONE: list[dict[tuple[str, int], torch.Tensor]] = []


@pytest.fixture
def alone(llm: Any) -> list[dict[tuple[str, int], torch.Tensor]]:
    """Every row of each prompt by itself, copied."""
    if not _ALONE:
        for prompt in PROMPTS:
            rows = run(llm, [prompt])[0].activations
            _ALONE.append({tap: value.clone() for tap, value in rows.items()})
    return _ALONE


def check(outputs: list[Any], alone: list[Any], prompts: list[list[int]] = PROMPTS) -> None:
    for output, rows, prompt in zip(outputs, alone, prompts, strict=False):
        assert output.receipt.status == "ok"
        length = len(prompt) + len(output.outputs[0].token_ids) - 1
        assert output.activations.positions.tolist() == list(range(length))
        assert output.activations.token_ids[: len(prompt)].tolist() == prompt
        for tap, wanted in rows.items():
            torch.testing.assert_close(output.activations[tap], wanted, rtol=1e-4, atol=1e-4)


def test_rows_are_the_workers_memory_until_their_last_tensor_is_gone(llm, alone):
    assert arena(llm)["leases"] == 0
    # One chunk: its rows lie together, so nothing is copied.
    (output,) = run(llm, [PROMPTS[0][:50]], count=1)
    assert arena(llm)["leases"] == 1
    rows = output.activations["resid_post", 1]
    again = output.activations["resid_post", 1]
    assert rows.data_ptr() == again.data_ptr()
    other = output.activations["resid_pre", 0]
    assert abs(rows.data_ptr() - other.data_ptr()) < 64 * 3 * 3 * 4 + 1, "they lie in one record"
    kept = rows[10:20]
    del output, rows, again, other
    assert arena(llm)["leases"] == 1
    run(llm, PROMPTS)
    torch.testing.assert_close(kept, alone[0]["resid_post", 1][10:20], rtol=1e-4, atol=1e-4)
    del kept
    assert arena(llm)["leases"] == 0


def test_results_that_cannot_be_mapped_leave_nothing_on_the_worker(llm, monkeypatch):
    def failing(*_: Any) -> None:
        raise OSError("Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(MappedArena, "update", failing)
        with pytest.raises(OSError, match="Too many"):
            run(llm, PROMPTS[:4])
    assert arena(llm)["leases"] == 0
    assert not inspect(llm).leftovers()


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_codec_leaves_is_what_it_makes_of_the_rows_in_memory(llm, codec):
    used = parse_codec(codec)
    for prompt in PROMPTS[:3]:
        (raw,) = run(llm, [prompt])
        (found,) = run(llm, [prompt], Capture(layers="all", sites=ALL_SITES, codec=codec))
        assert found.activations.codec == used
        assert found.activations.positions.tolist() == raw.activations.positions.tolist()
        assert found.activations.token_ids.tolist() == raw.activations.token_ids.tolist()
        assert found.receipt.status == "ok"
        for (site, layer), rows in raw.activations.items():
            encoded = found.activations.encoded(site, layer)
            # The very same forward: bit for bit.
            assert torch.equal(encoded, used.encode(rows.contiguous()))
            decoded = used.decode(encoded.contiguous(), 64, torch.float32)
            assert torch.equal(found.activations[site, layer], decoded)


def test_a_request_has_one_codec_and_one_that_fits_the_model(llm):
    mixed = [Capture(layers=0, codec="full8"), Capture(layers=1)]
    with pytest.raises(
        SpecError, match=r"capture\[0\]\[1\]\.codec: raw, and that of capture\[0\]\[0\] is full8"
    ):
        run(llm, [PROMPTS[0]], [mixed])
    with pytest.raises(SpecError, match=r"codec\.k: expected at most 64"):
        run(llm, [PROMPTS[0]], Capture(layers=0, codec="topk8:k=65"))


def small(model: Path, overflow: str, nbytes: int, **settings: Any) -> Any:
    more = {"sites": ALL_SITES, "overflow": overflow, "arena_bytes": nbytes, **settings}
    return engine(model, max_num_batched_tokens=64, max_num_seqs=8, block_size=32, midstream=more)


def test_requests_wait_for_room_and_every_row_comes(tiny_llama, alone, monkeypatch):
    with small(tiny_llama, "block", 1 << 20) as llm:
        most = []
        step = llm.llm_engine.step
        monkeypatch.setattr(
            llm.llm_engine, "step", lambda: (most.append(inspect(llm).waiting()), step())[1]
        )
        held = run(llm, PROMPTS)
        check(held, alone)
        assert max(most) > 2, "nobody had to wait"
        assert arena(llm)["memory_bytes"] <= 4 << 20
        check(run(llm, PROMPTS), alone)
        with pytest.raises(SpecError, match=r"may take \d+ bytes, .* arena_bytes"):
            run(llm, [[5] * 200], count=50)
        check(held, alone)


def test_what_has_no_room_lies_on_disk_and_every_row_comes(tiny_llama, alone, tmp_path):
    with small(tiny_llama, "spill", 1 << 20, spill_dir=str(tmp_path)) as llm:
        held = run(llm, PROMPTS) + run(llm, PROMPTS)
        assert arena(llm)["disk_bytes"] > 0
        assert arena(llm)["memory_bytes"] <= 1 << 20
        check(held[:12], alone)
        check(held[12:], alone)
        assert list(tmp_path.iterdir()) == []
        del held
        run(llm, PROMPTS[:1])
        assert arena(llm)["disk_bytes"] <= 1 << 20


def test_what_has_no_room_is_dropped_counted_and_nothing_else_is_wrong(tiny_llama, alone):
    with small(tiny_llama, "drop", 1 << 20) as llm:
        outputs = run(llm, PROMPTS)
        states = {output.receipt.status for output in outputs}
        assert states == {"ok", "partial"}
        for output, rows in zip(outputs, alone, strict=True):
            receipt = output.receipt
            missing = sum(one.expected - one.actual for one in receipt.captured)
            assert receipt.dropped == missing
            assert receipt.problems == ()
            assert (receipt.status == "partial") == (missing > 0)
            for (site, layer), wanted in rows.items():
                kept = output.activations.positions_of(site, layer)
                assert kept.tolist() == list(range(len(kept))), "later rows of a dropped request"
                found = output.activations[site, layer]
                torch.testing.assert_close(found, wanted[kept], rtol=1e-4, atol=1e-4)
        del outputs, output, found
        check(run(llm, PROMPTS[:1]), alone)


def test_the_first_rows_are_kept_and_the_receipt_tells_how_many_were_left_out(llm):
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    several = {"layers": [0, 2], "sites": ["resid_pre", "resid_post"]}
    asked = [
        [Capture(**several, max_rows=3)],
        [Capture([1]), Capture(**several, positions="generated", max_rows=2)],
        [Capture(**several, positions=[2, 5], max_rows=9)],
    ]
    alone = [run(llm, [one])[0].activations for one in prompts]
    count = len(PROMPTS[0])
    wanted = [[0, 1, 2], [count, count + 1], [2, 5]]
    left = [count + 3 - 3, 1, 0]
    for output, rows, places, more in zip(
        run(llm, prompts, asked), alone, wanted, left, strict=True
    ):
        assert output.receipt.status == "ok"
        *_, selected = output.receipt.selected
        assert selected.left_out == more
        for site in ("resid_pre", "resid_post"):
            for layer in (0, 2):
                assert output.activations.positions_of(site, layer).tolist() == places
                found = output.activations[site, layer]
                torch.testing.assert_close(found, rows[site, layer][places], rtol=0, atol=1e-4)
        if len(output.receipt.captured) > 4:
            assert len(output.activations["resid_post", 1]) == count + 3
    with pytest.raises(SpecError, match="depends on what is generated") as caught:
        run(llm, prompts[:1], Capture([1], positions=["last_row"], max_rows=2))
    assert caught.value.path == "capture.max_rows"
