"""`Norms` against plain torch on captured rows, and against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.asking import ask, ask_all
from support.engines import HAS_GPU, engine, greedy, tokens
from support.oracle_edits import At, EditOracle

from midstream import Capture, Norms, Steer

LONG = [(13 * nth) % 190 + 3 for nth in range(150)]
SHORT = [5, 17, 33, 101, 8, 77, 54, 23, 9]
TOLERANCE = 5e-4 if HAS_GPU else 1e-5


def norms_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().square().sum(1).sqrt()


def test_norms_are_those_of_captured_rows_and_of_transformers(llm: Any, oracle: EditOracle) -> None:
    steer = At(Steer(torch.linspace(-1, 1, oracle.width), 1))
    every, last = Norms("all"), Norms([0, -1], positions=["last_prompt", "generated"])
    asked = [[every, Capture("all")], None, [last], [every, Capture(1, reduce="norm")]]
    prompts = [LONG, SHORT, SHORT, LONG[:40]]
    outputs = ask_all(llm, prompts, 4, capture=asked, edits=[None, None, None, [steer.edit]])
    assert not hasattr(outputs[1], "norms")
    for prompt, output, edits in zip(prompts, outputs, [[], [], [], [steer]], strict=True):
        if not hasattr(output, "norms"):
            continue
        assert output.receipt.status == "ok"
        seen = oracle.run([*prompt, *output.outputs[0].token_ids][:-1], edits)
        assert [layer for _, layer in output.norms] == [0, 2] if prompt is SHORT else [0, 1, 2]
        for tap, rows in output.norms.items():
            wanted = norms_of(seen.values[tap][rows.positions])
            assert rows.values.dtype == torch.float32
            assert float(((rows.values - wanted) / wanted.clamp(min=1)).abs().max()) <= TOLERANCE
    whole, few, reduced = outputs[0], outputs[2], outputs[3]
    assert whole.norms["resid_post", 1].positions.tolist() == list(range(len(LONG) + 3))
    assert few.norms["resid_post", -1].positions.tolist() == [8, 9, 10, 11]
    assert not hasattr(few, "activations")
    for tap, rows in whole.activations.items():
        assert torch.equal(whole.norms[tap].values, norms_of(rows).float())
    same = reduced.activations["resid_post", 1][:, 0]
    assert torch.equal(reduced.norms["resid_post", 1].values, same)


def test_a_sink_has_the_norms_that_an_output_has(tiny_llama: Path, tmp_path: Path) -> None:
    layouts = ("per_file", "packed", "sharded")
    asked = [
        [
            Norms("all", positions="generated", sink="npz", tag=layout, layout=layout),
            Capture(1, sink="npz", tag=layout, layout=layout),
            Norms("all", "resid_pre"),
        ]
        for layout in layouts
    ]
    asked.append([Norms("all"), Norms("all", "resid_pre")])
    own = {"sites": ["resid_pre", "resid_post"], "sinks": {"npz": {"root": str(tmp_path)}}}
    with engine(tiny_llama, midstream=own) as llm:
        prompts = [tokens(SHORT)] * len(asked)
        *outputs, seen = llm.generate(prompts, greedy(4), capture=asked, use_tqdm=False)
    for output in outputs:
        result = output.capture_results["npz"]
        assert result.status == output.receipt.status == "ok"
        assert {site for site, _ in output.norms} == {"resid_pre"}
        assert not hasattr(output, "activations")
        files = {(file["site"], file["layer"]): file for file in result.manifest["files"]}
        assert set(files) == {("resid_post", 1), *(("norms.resid_post", n) for n in range(3))}
        for (site, layer), file in files.items():
            if site == "resid_post":
                continue
            start = file.get("prefix", "")
            with np.load(file["path"]) as stored:
                positions, values = stored[start + "positions"], stored[start + "values"]
            assert positions.tolist() == [9, 10, 11]
            assert file["rows"] == 3
            expected = seen.norms["resid_post", layer].values[positions].numpy()
            assert values.tobytes() == expected.tobytes()


def test_norms_of_bfloat16_rows_are_added_up_in_more_precision(tiny_llama: Path) -> None:
    with engine(tiny_llama, dtype="bfloat16") as llm:
        output = ask(llm, SHORT, 1, capture=[[Norms("all"), Capture("all")]])
    for tap, rows in output.activations.items():
        assert rows.dtype == torch.bfloat16
        assert torch.equal(output.norms[tap].values, norms_of(rows).float())
