"""Steps without work run vLLM's own model, the others the tapped one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask, ask_all
from support.engines import engine, generated

import midstream.runtime.worker.taps.taps as taps
from midstream import Capture, Probe, Steer
from midstream.runtime.worker.model_runner.model_switch import ModelSwitch

PROMPT = [5, 17, 33, 101, 8, 77, 54]
OTHER = [9, 3, 71, 20]


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each tap that runs, in eager mode: the number of rows."""
    rows: list[int] = []
    fire = taps._fire

    def noting(module: Any, table: Any, hidden: Any, residual: Any) -> None:
        rows.append(hidden.shape[0])
        fire(module, table, hidden, residual)

    monkeypatch.setattr(taps, "_fire", noting)
    return rows


def test_a_step_without_work_reaches_no_tap(llm, fired):
    taps_of_model = len(llm.info.shape.taps)
    ask_all(llm, [PROMPT, OTHER], 4)
    assert fired == []
    ask_all(llm, [PROMPT], 4, capture=Capture(layers=[0]))
    assert fired == [len(PROMPT)] * taps_of_model + [1] * taps_of_model * 3
    fired.clear()
    ask_all(llm, [PROMPT], 4)
    assert fired == []


def test_steps_beyond_the_last_position_with_work_reach_no_tap(llm, fired):
    vector = torch.ones(llm.info.shape.hidden_size)
    steer = Steer(vector, layer=1, positions=range(2))
    ask_all(llm, [PROMPT], 5, steer=[steer])
    assert fired == [len(PROMPT)] * len(llm.info.shape.taps)


def results(llm: Any) -> dict[str, Any]:
    vector = torch.linspace(-3, 3, llm.info.shape.hidden_size)
    before = ask(llm, PROMPT, 6)
    asked = ask(
        llm,
        PROMPT,
        6,
        capture=Capture(layers=[0, 1]),
        edits=[Steer(vector, layer=0, scale=2.0)],
        probes=Probe(vector, layer=1, name="p"),
    )
    after = ask(llm, PROMPT, 6)
    return {
        "tokens": [generated(out) for out in (before, asked, after)],
        "rows": torch.stack([asked.activations["resid_post", layer] for layer in (0, 1)]),
        "scores": torch.tensor(asked.probes["p"]),
    }


@pytest.fixture(scope="module")
def always(tiny_llama: Path) -> Iterator[dict[str, Any]]:
    with engine(tiny_llama, midstream={"tapped_model": "always"}) as llm:
        yield results(llm)


@pytest.mark.parametrize(
    ("eager", "setting"),
    [
        pytest.param(True, "startup", id="eager-startup"),
        pytest.param(True, "lazy", id="eager-lazy"),
        pytest.param(False, "startup", id="compiled-startup"),
        pytest.param(False, "lazy", id="compiled-lazy", marks=pytest.mark.nightly),
    ],
)
def test_two_models_return_what_one_tapped_model_does(
    always: dict[str, Any],
    tiny_llama: Path,
    setting: str,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ModelSwitch] = []
    attach = ModelSwitch.attach
    monkeypatch.setattr(ModelSwitch, "attach", lambda self: made.append(self) or attach(self))
    with engine(tiny_llama, midstream={"tapped_model": setting}, enforce_eager=eager) as llm:
        found = results(llm)
    (switch,) = made
    assert switch._places, "there is only one model"
    assert found["tokens"] == always["tokens"]
    torch.testing.assert_close(found["rows"], always["rows"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["scores"], always["scores"], rtol=1e-4, atol=1e-4)


def test_with_one_tapped_model_every_step_reaches_the_taps(tiny_llama, fired):
    with engine(tiny_llama, midstream={"tapped_model": "always"}) as llm:
        fired.clear()
        ask_all(llm, [PROMPT], 2)
        taps_of_model = len(llm.info.shape.taps)
    assert fired == [len(PROMPT)] * taps_of_model + [1] * taps_of_model
