"""What the model's head gives for the stream of each layer, against transformers in float32."""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from engine.refusals import assert_refused
from support import tiny
from support.end_oracle import MODULES, EndOracle
from support.engines import engine, generated
from support.inner_served import PROMPTS, ROOM, TOLERANCE, Served
from support.oracle_edits import At, Seen
from torch import Tensor
from vllm import SamplingParams

from midstream import Attention, Bias, Capture, Gate, Lens, Logits, Steer
from midstream.errors import SpecError
from midstream.lenses import JacobianLens, TunedLens
from midstream.plan import TopKeys
from midstream.results.readouts.lens import LensRows

SITES = ["resid_pre", "resid_mid", "resid_post", "final_norm", "logits", "rot_q"]
LONG = [(13 * nth) % 190 + 3 for nth in range(150)]
CHOSEN = [150, 3, 9]
WIDTH = 64
# A tuned lens of three layers, and a Jacobian lens of two.
LENS_BYTES = 4 * (3 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH * WIDTH)


# gemma2 caps its logits and adds one to the weights of its norm; gpt2 has a LayerNorm.
@pytest.fixture(
    scope="module", params=["llama", "gemma2", pytest.param("gpt2", marks=pytest.mark.nightly)]
)
def served(
    request: pytest.FixtureRequest,
    tiny_models: Path,
) -> Iterator[Served]:
    path = tiny.make(f"{request.param}-bias", tiny_models, tiny.MODELS[request.param])
    oracle = EndOracle(path, request.param)
    sites = SITES if request.param != "gpt2" else SITES[:-1]
    settings = {"sites": sites, "readout_bytes": LENS_BYTES}
    with engine(path, **ROOM, midstream=settings) as llm:
        yield Served(request.param, oracle, llm)


ONE = pytest.mark.parametrize("served", ["llama"], indirect=True)


@torch.no_grad()
def decoded(model: Any, norm: str, stream: Tensor) -> Tensor:
    """The logits that the reference's own norm and head give for a stream."""
    module: Any = reduce(getattr, norm.split("."), model)
    logits = model.get_output_embeddings()(module.forward(stream))
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def expected(served: Served, seen: Seen, layers: Any, site: str = "resid_post") -> Tensor:
    """The reference's logits of some layers, [T, layers, vocabulary]."""
    norm = MODULES[served.name][1]
    return torch.stack(
        [decoded(served.oracle.model, norm, seen.values[site, layer]) for layer in layers], 1
    )


def assert_lens(rows: LensRows, asked: Lens, wanted: Tensor) -> float:
    """Against logits [T, layers, vocabulary]; returns the largest error of a log probability."""
    mine = wanted[rows.positions]
    logprobs = mine.log_softmax(-1)
    assert rows.ids.shape == rows.values.shape == (*mine.shape[:2], asked.top)
    assert rows.values.dtype == rows.logsumexp.dtype == torch.float32
    assert rows.ids.dtype == rows.ranks.dtype == torch.int64
    errors = [torch.zeros(1)]
    if asked.top:
        best = logprobs.topk(asked.top)
        errors += [rows.logprobs - best.values, rows.logprobs - logprobs.gather(2, rows.ids)]
        assert float((rows.ids == best.indices).float().mean()) > 0.99
    if asked.tokens:
        assert list(rows.tokens) == list(asked.tokens)
        at = torch.tensor(rows.tokens).expand(*mine.shape[:2], -1)
        errors.append(rows.token_logprobs - logprobs.gather(2, at))
        theirs = mine.gather(2, at)[..., None]
        close = TOLERANCE * (1 + theirs.abs())
        least = 1 + (mine[:, :, None] > theirs + close).sum(-1)
        most = 1 + (mine[:, :, None] > theirs - close).sum(-1) - 1
        assert ((least <= rows.ranks) & (rows.ranks <= most.clamp(min=1))).all()
    errors.append((rows.logsumexp - mine.logsumexp(-1)) / 4)
    return max(float(one.abs().max()) for one in errors if one.numel())


LENSES = [
    Lens(top=5, tokens=CHOSEN),
    Lens([-1, 0], top=3, positions=["last_prompt", "generated"], name="few"),
    Lens(1, 0, [42, 7], positions=slice(2, 5)),
    Lens(site="resid_mid", top=190, name="mid"),
    Lens(top=2, site="resid_pre"),
]


def test_every_layer_is_decoded_as_transformers_decodes_it(served: Served) -> None:
    steer = At(Steer(torch.linspace(-1, 1, 64), 1))
    prompts = [LONG, *PROMPTS, PROMPTS[0]]
    beside: list[Any] = [Capture([1], "resid_post"), None, None, Logits(4), None]
    if served.name != "gpt2":
        beside[1] = Attention([1], reduce=TopKeys(3))
    asked = [[one, other] if other else [one] for one, other in zip(LENSES, beside, strict=True)]
    edits = [None, [steer.edit], [Bias({7: 90.0})], None, [steer.edit]]
    outputs = served.ask(prompts, 4, capture=asked, edits=edits)
    errors = []
    for nth, (prompt, output, lens) in enumerate(zip(prompts, outputs, LENSES, strict=True)):
        assert output.receipt.status == "ok", output.receipt
        ats = [steer] if edits[nth] == [steer.edit] else []
        seen = served.oracle.run([*prompt, *generated(output)][:-1], ats)
        (rows,) = output.lens.values()
        layers = range(3) if lens.layers.indices == "all" else [i % 3 for i in lens.layers.indices]
        assert rows.layers == tuple(layers)
        site = lens.sites.names[0]
        errors.append(assert_lens(rows, lens, expected(served, seen, layers, site)))
    assert max(errors) <= TOLERANCE, errors
    assert [len(one.lens[name]) for one, name in zip(outputs[:3], ["logit", "few", "logit"],
                                                     strict=True)] == [153, 4, 3]  # fmt: skip
    assert set(outputs[0].activations) == {("resid_post", 1)}
    assert not hasattr(outputs[2], "activations")
    counts = {(one.site, one.layer): one.actual for one in outputs[0].receipt.captured}
    assert counts["lens.logit", 0] == counts["lens.logit", 2] == 153


def maps(*shape: int, seed: int) -> Tensor:
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_registered_lenses_map_the_stream_by_the_formulas_of_their_papers(served: Served) -> None:
    weights = {nth: maps(WIDTH, WIDTH, seed=nth) for nth in range(3)}
    biases = {nth: maps(WIDTH, seed=10 + nth) for nth in range(3)}
    jacobians = {nth: torch.eye(WIDTH) + maps(WIDTH, WIDTH, seed=20 + nth) for nth in (0, 1)}
    lenses = served.llm.lenses
    with pytest.raises(SpecError, match="there is no lens 'tuned'; there is 'logit'; register it"):
        served.ask([LONG], 1, capture=Lens(kind="tuned"))
    lenses.register("tuned", TunedLens(weights, biases))
    lenses.register("jacobian", JacobianLens({0: torch.zeros(WIDTH, WIDTH)}))
    lenses.register("jacobian", JacobianLens(jacobians))
    try:
        assert lenses.names == ("tuned", "jacobian")
        check_registered(served, weights, biases, jacobians)
        with pytest.raises(
            SpecError, match=rf"readout_bytes is {LENS_BYTES}, of which {LENS_BYTES} are"
        ):
            lenses.register("more", JacobianLens(jacobians))
    finally:
        for name in lenses.names:
            lenses.remove(name)
    with pytest.raises(SpecError, match="there is no lens 'tuned'"):
        served.ask([LONG], 1, capture=Lens(kind="tuned"))


def check_registered(served: Served, weights: Any, biases: Any, jacobians: Any) -> None:
    """Both, and the plain one, of several requests together."""
    tuned = Lens(top=4, tokens=CHOSEN, kind="tuned", site="resid_pre")
    given = [
        [tuned, Lens(top=3, kind="jacobian", name="j")],
        [Lens([1, 0], top=2, kind="tuned", positions=slice(1, 4)), Lens(top=2)],
    ]
    outputs = served.ask([LONG, PROMPTS[1]], 3, capture=given)
    model, norm = served.oracle.model, MODULES[served.name][1]
    wanted: dict[int, dict[str, Tensor]] = {}
    for nth, prompt in enumerate((LONG, PROMPTS[1])):
        seen = served.oracle.run([*prompt, *generated(outputs[nth])][:-1])
        before = [seen.values["resid_pre", layer] for layer in range(3)]
        after = [seen.values["resid_post", layer] for layer in range(3)]
        moved = [h + h @ weights[at].T + biases[at] for at, h in enumerate(before)]
        # After a layer is before the next one.
        moved_after = [h + h @ weights[at + 1].T + biases[at + 1] for at, h in enumerate(after[:2])]
        carried = [h @ jacobians[at].T for at, h in enumerate(after[:2])]
        wanted[nth] = {
            "tuned": torch.stack(
                [decoded(model, norm, h) for h in (moved, moved_after[::-1])[nth]], 1
            ),
            "j": torch.stack([decoded(model, norm, h) for h in (*carried, after[2])], 1),
            "logit": torch.stack([decoded(model, norm, h) for h in after], 1),
        }
    errors = []
    for nth, (output, asked) in enumerate(zip(outputs, given, strict=True)):
        assert output.receipt.status == "ok", output.receipt
        for one in asked:
            errors.append(assert_lens(output.lens[one.name], one, wanted[nth][one.name]))
    assert max(errors) <= TOLERANCE, errors


def direction(served: Served, token: int, mapped: Tensor) -> Tensor:
    """Jᵀ (γ ⊙ W[token]) / ‖…‖ of the reference's weights, in float64."""
    model: Any = served.oracle.model
    norm = reduce(getattr, MODULES[served.name][1].split("."), model)
    gain = norm.weight.double() + (1 if served.name == "gemma2" else 0)
    read = gain * model.get_output_embeddings().weight[token].double()
    if isinstance(norm, torch.nn.LayerNorm):
        read -= read.mean()
    found = mapped.double().T @ read
    return (found / found.norm()).detach()


def test_steering_with_a_token_adds_the_direction_of_its_lens(served: Served) -> None:
    jacobians = {nth: torch.eye(WIDTH) + maps(WIDTH, WIDTH, seed=20 + nth) for nth in (0, 1)}
    weights = {nth: maps(WIDTH, WIDTH, seed=nth) for nth in range(3)}
    lenses, token, scale = served.llm.lenses, 42, 40.0
    lenses.register("jacobian", JacobianLens(jacobians))
    lenses.register("tuned", TunedLens(weights, {nth: maps(WIDTH, seed=9) for nth in range(3)}))
    whole = torch.eye(WIDTH)
    cases = [
        ([1], "resid_post", "logit", [whole]),
        ([2], "resid_mid", "logit", [whole]),
        ([0, 1], "resid_post", "jacobian", [jacobians[0], jacobians[1]]),
        ([1, 2], "resid_pre", "tuned", [whole + weights[1], whole + weights[2]]),
        # What leaves layer 0 enters layer 1; what leaves the last one has no map.
        ([0, 2], "resid_post", "tuned", [whole + weights[1], whole]),
    ]
    edits, wanted = [], []
    for layers, site, kind, mapped in cases:
        where = {"site": site, "positions": slice(2, None)}
        edits.append(Steer(token=token, lens=kind, layer=layers, scale=scale, **where))
        units = [direction(served, token, one) for one in mapped]
        for layer, unit in zip(layers, units, strict=True):
            found = lenses.direction(token, layer, kind, site)
            assert found.dtype == torch.float32
            assert float((found - unit).abs().max()) <= 1e-6
        wanted.append([
            At(Steer(unit, layer, scale, **where), lambda position: position >= 2)
            for layer, unit in zip(layers, units, strict=True)
        ])  # fmt: skip
    reading, plain = torch.linspace(-1, 1, WIDTH), direction(served, token, whole)
    edits.append(Gate(Steer(token=token, layer=1, scale=scale), reading))
    wanted.append([At(Gate(Steer(plain, 1, scale), reading))])
    asked = [Lens(top=1, tokens=token), Capture("all", "resid_post")]
    prompts = [PROMPTS[nth % 3] for nth in range(len(edits))]
    outputs = served.ask(prompts, 2, capture=[asked] * len(edits), edits=[[one] for one in edits])
    errors, rises = [], []
    for prompt, output, ats in zip(prompts, outputs, wanted, strict=True):
        assert output.receipt.status == "ok", output.receipt
        seen = served.assert_is(prompt, output, *ats)
        rows = output.lens["logit"]
        logits = expected(served, seen, range(3))
        errors.append(assert_lens(rows, Lens(top=1, tokens=token), logits))
        before = served.oracle.run([*prompt, *generated(output)][:-1])
        rises.append(logits - expected(served, before, range(3)))
    assert max(errors) <= TOLERANCE, errors
    # At the layer that is edited first, a token's own logit rises at each edited position.
    assert float(rises[0][2:, 1, token].min()) > 1
    lenses.remove("jacobian")
    lenses.remove("tuned")
    with pytest.raises(SpecError, match="there is no lens 'tuned'") as caught:
        served.ask([LONG], 1, edits=Steer(token=token, lens="tuned", layer=1))
    assert caught.value.path == "edits.lens"


@ONE
def test_ranks_are_those_of_the_whole_vocabulary(served: Served) -> None:
    every = served.llm.llm_engine.vllm_config.model_config.get_vocab_size()
    chosen = list(range(0, every, 5))
    (output,) = served.ask([PROMPTS[0]], 2, capture=Lens(top=every, tokens=chosen))
    rows = output.lens["logit"]
    places = (rows.ids[..., None] == torch.tensor(chosen)).int().argmax(2)
    assert torch.equal(rows.ranks, places + 1)
    assert torch.equal(rows.token_values, rows.values.gather(2, places))


@ONE
def test_a_cached_prompt_and_several_completions_have_their_own_rows(served: Served) -> None:
    asked = Lens(top=3, tokens=7, positions=["last_prompt", "generated"])
    prompt = PROMPTS[2] * 4
    served.ask([prompt], 1, capture=None)
    params = SamplingParams(n=2, temperature=1.5, seed=3, max_tokens=5, ignore_eos=True,
                            detokenize=False)  # fmt: skip
    (output,) = served.ask([prompt], params=params, capture=asked)
    assert output.num_cached_tokens == 64
    for one in output.outputs:
        seen = served.oracle.run([*prompt, *one.token_ids][:-1])
        wanted = expected(served, seen, range(3))
        assert assert_lens(one.lens["logit"], asked, wanted) <= TOLERANCE
    with pytest.raises(AttributeError, match="lens"):
        output.lens  # noqa: B018


@ONE
def test_what_cannot_be_had_is_refused(served: Served) -> None:
    assert_refused(
        lambda asked: ask_all(served.llm, [PROMPTS[0]], 1, capture=asked),
        [
            (Lens([0, 3]), "capture.layers[1]", "layer 3 is out of range"),
            (Lens(tokens=[3, 100_000]), "capture.tokens[1]", "there is no token 100000: the model"),
            (Lens(top=500), "capture.top", "the model has 199 tokens"),
            (Lens(tokens=" Paris"), "capture.tokens[0]", "needs a tokenizer"),
            ([[Lens([0]), Lens([1])]], "capture[0][1].name", "is a lens of this name too"),
        ],
    )
    assert_refused(
        lambda given: served.ask([LONG], 1, edits=Steer(**{"layer": 1, **given})),
        [
            ({"token": 100_000}, "edits.token", "there is no token 100000: the model has"),
            ({"token": " Paris"}, "edits.token", "needs a tokenizer"),
            ({"token": 3, "layer": [0, 5]}, "edits.layer[1]", "layer 5 is out of range"),
        ],
    )
    with pytest.raises(SpecError, match=r"llm\.lenses\.direction\(token, layer\)"):
        served.llm.steering.set(base=Steer(token=3, layer=1))
    params = SamplingParams(n=90, max_tokens=1, ignore_eos=True, detokenize=False)
    with pytest.raises(SpecError, match="may read 17280 rows .* a step has room for 16384"):
        served.ask([LONG], params=params, capture=Lens())


def test_an_engine_need_not_tap_the_final_norm(llm: Any) -> None:
    """The last layer's first token is the one that is sampled."""
    asked = Lens(top=1, positions="last_prompt")
    (output,) = ask_all(llm, [PROMPTS[0]], 1, capture=asked)
    assert output.lens["logit"].ids[0, -1].tolist() == generated(output)
