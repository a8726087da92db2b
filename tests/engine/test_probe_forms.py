"""Probes of several layers, and small MLPs as probes, against transformers' rows."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from support.conditions import first_met
from support.engine_view import inspect
from support.engines import generated, greedy, tokens
from support.oracle import HookEdit, Oracle
from support.updating import Stepped, check_replay, everything, held, steer, steps_ahead

from midstream import Gate, Probe, Steer
from midstream.errors import SpecError
from midstream.plan import MLP, Flag, Plan, Stop, Switch

WIDTH = 64
# The second comes in chunks.
PROMPTS = [[(7 * n) % 120 + 5 for n in range(20)], [(11 * n) % 150 + 5 for n in range(100)]]
DRAW = torch.Generator().manual_seed(11)
ROWS = torch.randn(3, WIDTH, generator=DRAW)


def network(activation: torch.nn.Module, hidden: int = 12) -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, hidden), activation, torch.nn.Linear(hidden, 1)
    )


def sites(reference: Oracle, ids: list[int], edits: Any = ()) -> Any:
    return reference.run(ids[:-1], edits)[1]


def ask(llm: Any, prompts: list[list[int]], count: int = 12, **asked: Any) -> Any:
    return llm.generate([tokens(one) for one in prompts], greedy(count), use_tqdm=False, **asked)


def test_a_probe_of_several_layers_sums_their_products_and_has_its_bias_once(llm, reference):
    llm.vectors.register("both", {("resid_post", 0): ROWS[0], ("resid_post", 2): ROWS[1]})
    asked = [
        Probe(ROWS[:2], layers=[2, 0], bias=0.5, name="backwards"),
        Probe({0: ROWS[0], 1: ROWS[1], -1: ROWS[2]}, bias=-1, site="resid_mid", name="all"),
        Probe("both", layer=[-1, 0], name="named", positions="generated"),
        Probe(ROWS[0], 0, name="one"),
    ]
    cold = ask(llm, PROMPTS, probes=[asked] * 2)
    warm = ask(llm, PROMPTS, probes=[asked] * 2)
    plain = ask(llm, PROMPTS)
    for prompt, output, again, bare in zip(PROMPTS, cold, warm, plain, strict=True):
        assert generated(output) == generated(again) == generated(bare)
        seen = sites(reference, [*prompt, *generated(output)])
        wanted = {
            "backwards": seen["resid_post", 2] @ ROWS[0] + seen["resid_post", 0] @ ROWS[1] + 0.5,
            "all": sum(seen["resid_mid", nth] @ ROWS[nth] for nth in range(3)) - 1,
            "named": (seen["resid_post", 0] @ ROWS[0] + seen["resid_post", 2] @ ROWS[1])[
                len(prompt) :
            ],
            "one": seen["resid_post", 0] @ ROWS[0],
        }
        for name, scores in wanted.items():
            for found in (output, again):
                assert torch.allclose(found.probes[name], scores, atol=1e-4), name
        assert not output.receipt.problems
    inspect(llm).check_integrity()


def test_a_probe_of_several_layers_shares_the_cache_with_requests_without_it(llm):
    prompt = PROMPTS[1]
    ask(llm, [prompt], count=1)
    probe = Probe(ROWS, layers=[0, 1, 2], positions="generated")
    (output,) = ask(llm, [prompt], count=40, probes=probe)
    assert output.num_cached_tokens == len(prompt) // 32 * 32
    whole = [*prompt, *output.outputs[0].token_ids]
    (again,) = ask(llm, [whole], count=1)
    assert again.num_cached_tokens == (len(whole) - 1) // 32 * 32 > output.num_cached_tokens


@pytest.mark.parametrize(
    "activation",
    [torch.nn.ReLU(), torch.nn.GELU(), torch.nn.Tanh(), torch.nn.SiLU()],
    ids=lambda one: type(one).__name__,
)
def test_the_scores_of_an_mlp_are_those_of_torchs_module(llm, reference, activation):
    module = network(activation)
    edit = Steer(ROWS[2], 1, 0.7)
    hook = HookEdit("resid_post", 1, ROWS[2], 0.7, lambda _at: True)
    asked = [Probe.from_torch(module, layer=1, name="mlp"), Probe(ROWS[0], 1, name="beside")]
    for output, prompt in zip(
        ask(llm, PROMPTS, probes=[asked] * 2, edits=edit), PROMPTS, strict=True
    ):
        rows = sites(reference, [*prompt, *generated(output)], [hook])["resid_post", 1]
        with torch.no_grad():
            assert torch.allclose(output.probes["mlp"], module(rows)[:, 0], atol=1e-4)
        assert torch.allclose(output.probes["beside"], rows @ ROWS[0], atol=1e-4)
        assert not output.receipt.problems


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_scores_of_sklearns_mlp_are_its_log_odds(llm, reference, activation):
    (output,) = ask(llm, PROMPTS[1:], count=16)
    ids = [*PROMPTS[1], *generated(output)]
    rows = sites(reference, ids)["resid_post", 2].numpy()
    labels = np.array(["no", "yes"])[(rows[:, 0] > np.median(rows[:, 0])).astype(int)]
    classifier = make_pipeline(
        StandardScaler(), MLPClassifier((8,), activation=activation, max_iter=30, random_state=0)
    )
    with pytest.warns(UserWarning, match="Maximum iterations"):
        classifier.fit(rows, labels)
    logs = classifier.predict_log_proba(rows)
    probe = Probe.from_sklearn(classifier, layer=2, name="yes")
    (found,) = ask(llm, PROMPTS[1:], count=16, probes=probe)
    assert found.probes["yes"].tolist() == pytest.approx(logs[:, 1] - logs[:, 0], abs=2e-3)


def test_both_stop_and_switch_where_transformers_scores_say(llm, reference):
    module = network(torch.nn.GELU())
    prompt, size = PROMPTS[0], len(PROMPTS[0])
    (whole,) = ask(llm, [prompt], count=24)
    seen = sites(reference, [*prompt, *generated(whole)])
    with torch.no_grad():
        of_mlp = module(seen["resid_post", 1])[size:, 0].tolist()
    of_layers = (seen["resid_post", 0] @ ROWS[0] + seen["resid_post", 2] @ ROWS[1])[size:].tolist()
    makes = {
        "mlp": (of_mlp, lambda act: Probe.from_torch(module, 1, name="p", phase="generated")
                .replace(act=act)),
        "layers": (of_layers, lambda act: Probe(ROWS[:2], [0, 2], name="p", phase="generated",
                                                act=act)),
    }  # fmt: skip
    edit, hook = steer(ROWS[2], 0, 3.0)
    for scores, make in makes.values():
        values = sorted(scores)
        threshold = (values[-4] + values[-5]) / 2
        where = first_met(scores, above=threshold)
        acts = (Stop(above=threshold), Flag(above=threshold))
        stopped, flagged = ask(llm, [prompt] * 2, count=24, probes=[[make(act)] for act in acts])
        assert generated(stopped) == generated(whole)[: where + 1]
        assert stopped.outputs[0].stop_reason == "probe:p"
        for output in (stopped, flagged):
            (action,) = output.receipt.actions
            assert (action.position, action.score) == (
                size + where, pytest.approx(scores[where], abs=1e-4),
            )  # fmt: skip
        run = Stepped(llm)
        switch = make(Switch([edit], above=threshold))
        run.add("a", prompt, greedy(24), probes=switch, capture=everything())
        completion = run.finish()["a"].outputs[0]
        assert held(completion.receipt)[0] == (0, size + where + 1 + steps_ahead(llm))
        check_replay(reference, prompt, completion, {1: [hook]})
    inspect(llm).check_integrity()


@pytest.mark.parametrize("at", [[2], [1], [1, 2]], ids=str)
def test_a_gate_reads_the_sum_of_several_layers_at_the_last_of_them_or_later(llm, reference, at):
    prompt = PROMPTS[0]
    seen = sites(reference, [*prompt, 0])
    scores = seen["resid_post", 0] @ ROWS[0] + seen["resid_post", 1] @ ROWS[1] + 0.25
    threshold = float(scores.sort().values[9:11].mean())
    probe = Probe(ROWS[[1, 0]], layers=[1, 0], bias=0.25)
    edit = Gate(Steer(ROWS[2], at, 0.8, phase="prompt"), probe, threshold)
    assert Gate.parse(edit.to_dict()) == edit
    (output,) = ask(llm, [prompt], edits=edit, capture=everything())
    ids = [*prompt, *generated(output)]
    is_open = [*(scores > threshold).tolist(), *[False] * len(ids)]
    assert 5 < sum(is_open) < 15
    hooks = [HookEdit("resid_post", nth, ROWS[2], 0.8, is_open.__getitem__) for nth in at]
    rows = sites(reference, ids, hooks)
    for tap in output.activations:
        assert torch.allclose(output.activations[tap].float(), rows[tap], atol=1e-4), tap
    assert not output.receipt.problems


def test_what_cannot_be_read_is_rejected_by_name(llm):
    mlp = Probe.from_torch(network(torch.nn.ReLU()), 1).mlp
    wide = Probe.from_torch(network(torch.nn.ReLU(), 80), 1)
    two = {"direction": ROWS[:2].tolist(), "layer": [0, 2]}
    steered = Steer(ROWS[2], 1)
    cases = [
        (lambda: Probe(ROWS[0], layers=[0, 1]), "expected one row per layer, \\[2, width\\]"),
        (lambda: Probe(ROWS, layers=[0, 1]), "got 3 rows for 2 layers"),
        (lambda: Probe("both", layer="all"), "list those that the probe reads"),
        (lambda: Probe(mlp=mlp, layers=[0, 1]), "an MLP reads one layer, got 2 layers"),
        (lambda: Probe(mlp=mlp), "layer: missing"),
        (lambda: Probe(ROWS[0], 1, mlp=mlp), "mlp: a probe has one of"),
        (lambda: MLP(ROWS, [0, 0], [1, 1, 1]), "hidden_bias: expected 3 numbers"),
        (lambda: MLP(ROWS, [0] * 3, [1] * 3, "sigmoid"), "activation"),
        (lambda: Gate(steered, Probe(mlp=mlp, layer=1)), "probe.mlp: a gate reads a direction"),
        (lambda: Gate(steered, two, hold="rest"), "gate with memory .* reads one layer"),
        (lambda: ask(llm, PROMPTS[:1], edits=Gate(steered, two)), "computed after resid_post"),
        (lambda: ask(llm, PROMPTS[:1], probes=wide), "the limit is 64; raise .* edits_per_site"),
        (lambda: ask(llm, PROMPTS[:1], probes=Probe(ROWS[:2], layer=[2, -1])), "is the same as"),
        (lambda: ask(llm, PROMPTS[:1], probes=Probe(ROWS[:2, :9], layer=[0, 1])), "expected 64"),
    ]  # fmt: skip
    for make, problem in cases:
        with pytest.raises(SpecError, match=problem):
            make()
    plan = Plan.make(probes=[Probe(mlp=mlp, layer=1), Probe(ROWS, [0, 1, 2], name="three")])
    assert Plan.parse(plan.to_dict()) == plan
