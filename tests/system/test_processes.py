"""The engine core in a process of its own, as vLLM runs by default."""

import pytest
from support.own_process import python
from support.stale_check import check_no_stale_graph

SCRIPT = """
import sys, torch
from support.engines import ALL_SITES, engine, greedy, tokens, generated
from support.forging import forged
from midstream import Capture, Steer
from midstream.errors import ReceiptError
from midstream.runtime.frontend.results import row_streamer
from midstream.sinks import registry
from importlib.metadata import EntryPoint
from pathlib import Path
from support.engine_view import inspect

def in_pieces(llm, outputs):
    "How many pieces each came in, which put together are what it has."
    sink = inspect(llm).sink("rows")
    counts = []
    for output in outputs:
        rows, pieces = sink.whole(output.request_id)
        assert list(rows) == list(output.activations)
        for tap, (encoded, positions, ids) in rows.items():
            assert torch.equal(encoded, output.activations.encoded(*tap))
            assert torch.equal(positions, output.activations.positions_of(*tap))
            assert torch.equal(ids, output.activations.token_ids_of(*tap))
        counts.append(len(pieces))
    sink.given.clear()
    return counts

if __name__ == "__main__":
    prompts = [tokens(list(range(3 + n, 40 + 2 * n))) for n in range(12)]
    steers = [[Steer([0.5 * n] * 64, layer=n % 3)] if n % 2 else None for n in range(12)]
    args = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 32}
    args["midstream"] = {"sites": ALL_SITES, "sinks": {"rows": {}}}
    row_streamer.CHECK_SECONDS = 0
    entry = EntryPoint("rows", "support.sinking:AsTheyCome", registry.GROUP)
    registry.entry_points = lambda group: [entry]
    with engine(Path(sys.argv[1]), enable_prefix_caching=True, **args) as llm:
        outputs = llm.generate(prompts, greedy(6, detokenize=False), steer=steers,
            capture=[[Capture("all", ALL_SITES, sink=sink) for sink in ("memory", "rows")]] * 12,
            use_tqdm=False)
        pieces = in_pieces(llm, outputs)
        long = llm.generate(tokens([7] * 200), greedy(2, detokenize=False),
            capture=Capture(layers="all"), use_tqdm=False)[0]
        try:
            llm.generate(prompts[0], greedy(2), steer=[Steer([1.0], layer=0)])
        except ValueError as error:
            refused = str(error)
        again = llm.generate(prompts[0], greedy(6, detokenize=False), use_tqdm=False)[0]
        steered = [
            llm.generate(tokens([7] * 200), greedy(4, detokenize=False), use_tqdm=False,
                steer=[Steer([0.5] * 64, layer=1)])[0]
            for _ in range(2)
        ]
        # One plan arrives as junk on the workers.
        try:
            with forged(2):
                llm.generate(prompts[:3], greedy(6, detokenize=False), use_tqdm=False,
                    steer=[[Steer([0.25 + n] * 64, layer=0)] for n in range(3)])
        except ReceiptError as error:
            failed = [(o.outputs[0].finish_reason, o.receipt.status) for o in error.outputs]
            complaint = str(error)
        after = llm.generate(prompts[0], greedy(6, detokenize=False), use_tqdm=False)[0]
        names = ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")
        parameters = {name: llm.parameter(name) for name in names}
    torch.save({
        "tokens": [generated(o) for o in outputs],
        "rows": [dict(o.activations.items()) for o in outputs],
        "status": [o.receipt.status for o in outputs],
        "pieces": pieces,
        "long": long.activations["resid_post", 2].shape[0],
        "refused": refused,
        "again": generated(again),
        "steered": [generated(o) for o in steered],
        "cached": [(o.receipt.edited.cached, o.receipt.edited.expected) for o in steered],
        "failed": failed,
        "complaint": complaint,
        "parameters": parameters,
        "after": generated(after),
    }, sys.argv[2])
"""


def test_a_separate_engine_process_gives_what_the_same_process_gives(tiny_llama, tmp_path):
    import torch

    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    results = []
    for is_separate in "01":  # started by `spawn`, as vLLM does on a CPU always
        out = tmp_path / f"{is_separate}.pt"
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": is_separate}
        python(script, tiny_llama, out, timeout=540, **environment)
        results.append(torch.load(out))
    expected, found = results
    assert found["status"] == ["ok"] * 12
    assert sum(found["pieces"]) > 24, "rows did not come before the end"
    assert found["tokens"] == expected["tokens"]
    assert found["again"] == found["tokens"][0]
    assert found["long"] == 201
    # The second of two alike is served the edited blocks of the first.
    assert found["cached"] == [(0, 203), (192, 203)]
    assert found["steered"][0] == found["steered"][1] == expected["steered"][0]
    assert found["failed"] == [("length", "ok"), ("error", "error"), ("length", "ok")]
    assert "SpecError" in found["complaint"]
    assert found["parameters"]["lm_head.weight"].shape == (199, 64)
    for name, value in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], value)
    assert found["after"] == expected["tokens"][0]
    assert "64" in found["refused"]
    for mine, theirs in zip(found["rows"], expected["rows"], strict=True):
        assert set(mine) == set(theirs)
        for tap, value in theirs.items():
            torch.testing.assert_close(mine[tap], value, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_a_graph_compiled_under_other_settings_is_never_used(tiny_llama, tmp_path):
    check_no_stale_graph(tmp_path, tiny_llama, {})
