"""Probes with classes, attention probes, MultiMax, links and pools, against transformers' rows:
each score by its definition in float64, over chunks of a prompt and what the cache serves.
"""

from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.cached_pair import SIZE, WHOLE, Pair, fresh
from support.conditions import first_met
from support.engine_view import inspect
from support.engines import engine, generated, greedy, tokens
from support.oracle import Oracle
from support.score_rules import attended, by_output, multimax, sigmoid, softmax
from support.updating import Stepped, steps_ahead

from midstream import Capture, Gate, Probe, SamplingParams, Steer, Threshold
from midstream.errors import SpecError
from midstream.plan import AttentionPool, Classes, Flag, Hidden, Stop, Switch

DRAW = np.random.default_rng(5)
ROWS = DRAW.standard_normal((12, tiny.HIDDEN)).astype(np.float32)
ROWS[3:5] /= 20  # queries: so that no token has all of the weight
ROWS[:3] /= 20  # classes
ROWS[5:9] /= 10
LAYER, BIAS = 1, [0.5, -1.0, 0.25]
# The second comes in chunks of 64 tokens.
PROMPTS = [[(7 * place) % 120 + 5 for place in range(20)], [*range(5, 155)]]

CLASSES = Classes(ROWS[:3], BIAS, ["safe", "spam", "harm"])
HEADS = AttentionPool(query=ROWS[3:5], value=ROWS[5:7])
ROLLING = AttentionPool(query=ROWS[3:5], value=ROWS[5:7], window=10)
UNIT_BIAS = np.array([0.5, 0.0, -0.5, 1.0, 0.0])
UNITS = Hidden(ROWS[[0, 5, 6, 7, 8]], UNIT_BIAS, "gelu")
BEHIND = AttentionPool(query=ROWS[3:5, :5], value=-ROWS[10:12, :5])
MAXIMA = AttentionPool(value=ROWS[5:7], kind="max")


def probe(name: str, **fields: Any) -> Probe:
    """The probe of a family by its name; they read 16 numbers together."""
    arguments: dict[str, Any] = {
        "linear": {"direction": ROWS[7], "link": "sigmoid", "bias": 0.5},
        "classes": {"classes": CLASSES, "link": "softmax", "pool": "mean:8"},
        "attention": {"attention_pool": HEADS, "bias": 0.5},
        "rolling": {"attention_pool": ROLLING, "pool": "max", "link": "sigmoid"},
        "multimax": {"attention_pool": MAXIMA, "bias": -1.0},
        "network": {"hidden": UNITS, "attention_pool": BEHIND, "bias": 0.5},
        "average": {"direction": ROWS[7], "pool": "ema:0.9"},
        "largest": {"direction": ROWS[8], "pool": "max"},
    }[name]
    return Probe(layer=LAYER, name=name, **{**arguments, **fields})


FAMILIES = ("linear", "classes", "attention", "rolling", "multimax", "average", "largest")


def expected(name: str, rows: Any) -> np.ndarray:
    """The scores of a family, by its definition, of rows [n, width]."""
    h = np.asarray(rows, np.float64)
    query, value = h @ ROWS[3:5].T, h @ ROWS[5:7].T
    if name == "linear":
        return sigmoid(h @ ROWS[7] + 0.5)
    if name == "classes":
        return by_output("mean:8", softmax(h @ ROWS[:3].T + BIAS))
    if name == "attention":
        return attended(query, value) + 0.5
    if name == "rolling":
        return by_output("max", sigmoid(attended(query, value, 10)))
    if name == "network":
        units = torch.nn.functional.gelu(torch.from_numpy(h @ ROWS[[0, 5, 6, 7, 8]].T + UNIT_BIAS))
        query, value = units.numpy() @ ROWS[3:5, :5].T, units.numpy() @ -ROWS[10:12, :5].T
        return attended(query, value) + 0.5
    if name == "multimax":
        return multimax(value) - 1
    if name == "average":
        return by_output("ema:0.9", h @ ROWS[7])
    assert name == "largest"
    return by_output("max", h @ ROWS[8])


def rows_of(reference: Oracle, ids: list[int]) -> Any:
    return reference.run(ids[:-1], ())[1]["resid_post", LAYER].double()


def ask(llm: Any, prompts: list[list[int]], count: int = 12, **asked: Any) -> Any:
    return llm.generate([tokens(one) for one in prompts], greedy(count), use_tqdm=False, **asked)


def close(scores: torch.Tensor, wanted: np.ndarray, atol: float = 2e-4) -> None:
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.double().numpy(), wanted, rtol=1e-4, atol=atol)


def test_each_family_scores_by_its_definition_over_chunks_and_cached_blocks(llm, reference):
    asked = [probe(name) for name in FAMILIES]
    cold = ask(llm, PROMPTS, probes=[asked] * 2)
    warm = ask(llm, PROMPTS, probes=[asked] * 2)
    plain = ask(llm, PROMPTS)
    assert warm[1].num_cached_tokens == 128
    for prompt, output, again, bare in zip(PROMPTS, cold, warm, plain, strict=True):
        assert generated(output) == generated(again) == generated(bare)
        rows = rows_of(reference, [*prompt, *generated(output)])
        for name in FAMILIES:
            for found in (output, again):
                close(found.probes[name], expected(name, rows))
                assert found.probes.positions_of(name).tolist() == list(range(len(rows)))
            kept = slice(again.num_cached_tokens)
            assert torch.equal(output.probes[name][kept], again.probes[name][kept])
        assert output.probes.outputs_of("classes") == ("safe", "spam", "harm")
        assert output.probes["classes"].shape == (len(rows), 3)
        assert not output.receipt.problems
        assert {one.name: one.actual for one in output.receipt.probed} == dict.fromkeys(
            FAMILIES, len(rows)
        )
    inspect(llm).check_integrity()


@pytest.mark.parametrize("where", ["generated", slice(40, 100), "last_prompt"], ids=str)
def test_the_tokens_so_far_are_those_that_the_probe_selects(llm, reference, where):
    prompt = PROMPTS[1]
    asked = [probe(name, positions=where) for name in FAMILIES]
    (output,) = ask(llm, [prompt], probes=asked)
    rows = rows_of(reference, [*prompt, *generated(output)])
    for name in FAMILIES:
        selected = output.probes.positions_of(name).tolist()
        assert 0 < len(selected) < len(prompt)
        close(output.probes[name], expected(name, rows[selected]))


@pytest.mark.parametrize("name", [*FAMILIES, "network"])
def test_an_act_reads_the_scores_that_come_back(llm, reference, name):
    """A Stop among generated tokens, a Flag, and a Switch; of classes, on one of them."""
    prompt, size = PROMPTS[0], len(PROMPTS[0])
    output = {"output": "harm"} if name == "classes" else {}
    # So that scores that never fall have a place that is met late.
    here = {"phase": "generated"}
    (whole,) = ask(llm, [prompt], count=24)
    rows = rows_of(reference, [*prompt, *generated(whole)])[size:]
    scores = expected(name, rows)
    scores = scores[:, 2] if output else scores
    where, threshold = place_and_threshold(scores)
    acts = (Stop(above=threshold, **output), Flag(above=threshold, **output))
    stopped, flagged = ask(
        llm, [prompt] * 2, 24, probes=[[probe(name, act=act, **here)] for act in acts]
    )
    assert generated(stopped) == generated(whole)[: where + 1]
    assert stopped.outputs[0].stop_reason == f"probe:{name}"
    assert len(stopped.probes[name]) == where + 1
    for found in (stopped, flagged):
        (action,) = found.receipt.actions
        assert action.position == size + where
        assert action.score == pytest.approx(scores[where], abs=2e-4)
    run = Stepped(llm)
    switch = Switch([Steer(ROWS[9], 0, 3.0)], above=threshold, **output)
    run.add("a", prompt, greedy(24), probes=probe(name, act=switch, **here))
    (action,) = run.finish()["a"].outputs[0].receipt.actions
    assert (action.kind, action.position) == ("switch", size + where)
    inspect(llm).check_integrity()


def place_and_threshold(scores: np.ndarray) -> tuple[int, float]:
    """A late place at which a score is above all before it by most, and a threshold between."""
    place, rise = late_rise(scores)
    assert rise > 0.01, "more than float32 and the engine's sums differ by"
    threshold = float(scores[place] - rise / 2)
    assert first_met(scores.tolist(), above=threshold) == place
    return place, threshold


def late_rise(scores: np.ndarray) -> tuple[int, float]:
    """The late place at which a score is above all before it by most, and by how much."""
    rise = scores[1:] - np.maximum.accumulate(scores)[:-1]
    place = 1 + int(np.argmax(rise[:-2]))
    return place, float(rise[place - 1])


def test_a_kept_score_of_a_cached_prompt_stops_its_request(wide, uncached, reference):
    pair = Pair(wide, uncached)
    for name in ("classes", "attention", "rolling", "multimax", "average", "network"):
        output = {"output": 2} if name == "classes" else {}
        scores = np.zeros(WHOLE)
        while late_rise(scores)[1] < 0.05:  # some prompts have their largest score first
            prompt = fresh(SIZE)
            scores = expected(name, rows_of(reference, [*prompt, 0]))[:WHOLE]
            scores = scores[:, 2] if output else scores
        pair.ask(prompt, 0, probes=probe(name))
        again = pair.ask(prompt, WHOLE, probes=probe(name))
        where, threshold = place_and_threshold(scores)
        act = Stop(above=threshold, **output)
        stopped = pair.ask(prompt, None, probes=probe(name, act=act))
        assert stopped.num_cached_tokens == WHOLE
        assert stopped.outputs[0].token_ids == []
        (action,) = stopped.receipt.actions
        assert action.position == where
        mine = stopped.probes[name]
        assert torch.equal(mine, again.probes[name][: len(mine)])


def test_classes_share_the_kept_numbers_of_each(wide, uncached):
    """A number is kept by what it is computed by: another link or pool reads the same ones."""
    pair, prompt = Pair(wide, uncached), fresh(SIZE)
    pair.ask(prompt, 0, probes=probe("classes"))
    pair.ask(prompt, WHOLE, probes=probe("classes", link="none", pool="max"))
    swapped = Classes(ROWS[[0, 1, 9]], BIAS)
    pair.ask(prompt, 0, probes=probe("classes", classes=swapped))
    pair.ask(prompt, WHOLE, probes=probe("classes", classes=swapped))


def test_each_of_several_completions_has_scores_of_its_own(llm, reference):
    prompt = PROMPTS[1]
    settings = SamplingParams(n=3, max_tokens=10, temperature=1.0, ignore_eos=True)
    asked = [probe(name) for name in ("attention", "classes")]
    (output,) = llm.generate([tokens(prompt)], settings, use_tqdm=False, probes=asked)
    texts = set()
    for completion in output.outputs:
        ids = [*prompt, *completion.token_ids]
        texts.add(tuple(ids))
        rows = rows_of(reference, ids)
        for name in ("attention", "classes"):
            close(completion.probes[name], expected(name, rows))
    assert len(texts) > 1


def test_a_preempted_request_counts_each_token_once(llm, reference):
    prompt, size = PROMPTS[0], len(PROMPTS[0])
    (whole,) = ask(llm, [prompt], count=24)
    scores = expected("attention", rows_of(reference, [*prompt, *generated(whole)])[size:])
    where, threshold = place_and_threshold(scores)
    asked = probe("attention", act=Stop(above=threshold), phase="generated")
    run = Stepped(llm)
    run.add("a", prompt, greedy(24), probes=asked)
    for steps in (3, where - 2):
        run.step(steps)
        llm.reset_prefix_cache(reset_running_requests=True)
    found = run.finish()["a"]
    assert generated(found) == generated(whole)[: where + 1]
    close(found.probes["attention"], scores[: where + 1])


def test_an_mlp_and_a_sum_of_layers_have_a_link_and_a_pool(llm, reference):
    module = torch.nn.Sequential(
        torch.nn.Linear(tiny.HIDDEN, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    several = torch.nn.Sequential(
        torch.nn.Linear(tiny.HIDDEN, 6), torch.nn.SiLU(), torch.nn.Linear(6, 4)
    )
    asked = [
        Probe.from_torch(module, LAYER, name="mlp").replace(link="sigmoid", pool="mean:3"),
        Probe(ROWS[5:7], layers=[0, 2], bias=0.5, name="layers", link="sigmoid", pool="ema:0.5"),
        Probe.from_torch(several, LAYER, name="several"),
        probe("network"),
    ]
    for prompt, output in zip(PROMPTS, ask(llm, PROMPTS, probes=[asked] * 2), strict=True):
        rows = reference.run([*prompt, *generated(output)][:-1], ())[1]
        with torch.no_grad():
            mlp = module(rows["resid_post", LAYER])[:, 0].double().numpy()
            close(output.probes["several"], several(rows["resid_post", LAYER]).double().numpy())
        close(output.probes["network"], expected("network", rows["resid_post", LAYER].double()))
        close(output.probes["mlp"], by_output("mean:3", sigmoid(mlp)))
        first, last = (rows["resid_post", layer].double().numpy() for layer in (0, 2))
        layers = sigmoid(first @ ROWS[5] + last @ ROWS[6] + 0.5)
        close(output.probes["layers"], by_output("ema:0.5", layers))
        assert not output.receipt.problems


def test_in_bfloat16_scores_are_those_of_the_rows_for_256_classes_too(tiny_llama):
    """Of the engine's own rows, which are rounded where they are captured; a probe's are not."""
    settings = {"probes": 300, "edits_per_site": 300}
    many = DRAW.standard_normal((256, tiny.HIDDEN)).astype(np.float32) / 20
    asked = [Probe(classes=Classes(many), layer=LAYER, name="many", link="softmax")]
    asked += [probe(name) for name in FAMILIES]
    with engine(
        tiny_llama, dtype="bfloat16", max_num_batched_tokens=64, block_size=32, midstream=settings
    ) as llm:
        (first,) = ask(llm, PROMPTS[1:], probes=asked, capture=Capture(LAYER))
        (again,) = ask(llm, PROMPTS[1:], probes=asked)
        assert again.num_cached_tokens == 128
        rows = first.activations["resid_post", LAYER].double().numpy()
        close(first.probes["many"], softmax(rows @ many.astype("f8").T), 1e-3)
        for name in FAMILIES:
            # A row of bfloat16 is off by 2 ** -9 of it; sums of two heads by more.
            close(first.probes[name], expected(name, rows), 3e-2)
        for name in ("many", *FAMILIES):
            assert torch.equal(again.probes[name][:128], first.probes[name][:128])
        inspect(llm).check_integrity()


def test_a_controller_and_a_guard_of_every_request_read_them(llm, reference):
    prompt, size = PROMPTS[0], len(PROMPTS[0])
    (whole,) = ask(llm, [prompt], count=24)
    rows = rows_of(reference, [*prompt, *generated(whole)])[size:]
    for name in ("attention", "rolling", "multimax", "average"):
        where, threshold = place_and_threshold(expected(name, rows))
        asked = probe(name, phase="generated")
        run = Stepped(llm)
        law = Threshold(name, above=threshold, on=0.5, off=1.0)
        edit = Steer(1e-6 * ROWS[9], 0)
        run.add("a", prompt, greedy(24), probes=asked, edits=edit, controller=law)
        versions = run.finish()["a"].outputs[0].receipt.versions
        changed = [one.positions[0] for one in versions if one.scale == 0.5]
        assert changed[0] == size + where + 1 + steps_ahead(llm), name
        guard = probe(name, act=Stop(above=threshold))
        llm.steering.set(generated=guard)
        (stopped,) = ask(llm, [prompt], count=24)
        llm.steering.clear()
        assert generated(stopped) == generated(whole)[: where + 1]
        close(stopped.probes[name], expected(name, rows)[: where + 1])


def test_what_cannot_be_read_or_has_no_room_is_rejected_by_name(llm):
    steer = Steer(ROWS[9], 1)
    many = Classes(np.tile(ROWS, (2, 1))[:17])
    cases = [
        (lambda: ask(llm, PROMPTS[:1], probes=Probe(classes=many, layer=1)),
         "probes: the request reads 17 scores .*one for each class.*setting probes"),
        (lambda: Gate(steer, probe("classes"), 0.0), "probe.classes: a gate reads"),
        (lambda: Gate(steer, probe("attention"), 0.0), "probe.attention_pool: a gate reads"),
        (lambda: Gate(steer, probe("average"), 0.0), "probe.pool: a gate reads"),
        (lambda: Gate(steer, probe("linear", positions="all"), 0.0), "probe.link: a gate reads"),
        (lambda: ask(llm, PROMPTS[:1], probes=probe("classes", classes=Classes(ROWS[:2, :5]))),
         r"probes.classes.weights\[0\]: expected 64 numbers"),
        (lambda: ask(llm, PROMPTS[:1], probes=probe("attention", attention_pool=AttentionPool(
            query=ROWS[:1, :5], value=ROWS[:1, :5]))),
         r"probes.attention_pool.query\[0\]: expected 64"),
        (lambda: ask(llm, PROMPTS[:1], edits=steer, probes=probe("classes"),
                     controller={"threshold": {"probe": "classes", "above": 1.0}}),
         "controller.threshold.probe: 'classes' has classes"),
    ]  # fmt: skip
    for make, words in cases:
        with pytest.raises(SpecError, match=words):
            make()
