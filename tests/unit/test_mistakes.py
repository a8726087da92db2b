"""What a newcomer gets wrong first: each mistake works, or is rejected with what to write instead.

Mistakes that need an engine are in `tests/engine/test_mistakes.py`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM as VllmLLM
from vllm import envs

from midstream import LLM, Ablate, Activations, AsyncLLM, Capture, Config, Probe, Role, Steer, Text
from midstream.api.arguments import CallArguments, check_names
from midstream.api.default_capture import DefaultCapture
from midstream.api.sampling_params import SamplingParams
from midstream.compat.foreign_fields import check_body, check_extra_args
from midstream.errors import ConfigError, ScaleWarning, SpecError, UnsupportedError
from midstream.plan import Gate, ModelShape, Plan, Prompt, Reading
from midstream.plan.operations import steer as steer_module
from midstream.plan.positions.prompt import Message
from midstream.plan.positions.text_map import TextMap
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.frontend.request.call_plan import merged_plan
from midstream.runtime.frontend.results.delivery import SeveralCompletions
from midstream.runtime.vllm.engine_rules import check_script
from midstream.sae.sae import SAE
from midstream.steering import VectorRegistry

LAYERS, WIDTH = 30, 8
SITES = ("resid_pre", "resid_mid", "resid_post")
SHAPE = ModelShape(LAYERS, WIDTH, [(site, layer) for site in SITES for layer in range(LAYERS)])
V = np.arange(1.0, WIDTH + 1)
ROWS = np.ones((LAYERS, WIDTH))
TEXT = "The capital of Germany"
STARTS, STOPS = (0, 4, 12, 15), (3, 11, 14, 22)
PLAIN = Prompt(4, text=TextMap(TEXT, STARTS, STOPS))
CHAT = Prompt(4, messages=(Message("system", 0, 0, 2), Message("user", 1, 2, 4)))


def ask(
    capture: Any = None,
    edits: Any = None,
    probes: Any = None,
    steer: Any = None,
    prompt: Prompt = PLAIN,
    max_tokens: int = 4,
) -> Any:
    """Carry a call with one prompt as far as an engine would see it."""
    plan = CallArguments(capture, steer, edits, probes).alone().plan()
    assert plan is not None
    bound = plan.bind(VectorRegistry(SHAPE).lookup, LAYERS)
    return resolve(bound, SHAPE, prompt, max_tokens)


def call(count: int, **given: Any) -> Any:
    """Deal the arguments of a call out to several prompts."""
    return [each.plan() for each in CallArguments(**given).per_prompt(count)]


def to_vllm(function: str, **given: Any) -> None:
    check_names(function, given, getattr(VllmLLM, function))


def to_async(**given: Any) -> None:
    asyncio.run(anext(AsyncLLM.generate(SimpleNamespace(_started=None), "abc", None, **given)))


def rows(dtype: torch.dtype = torch.float32) -> Activations:
    """Rows of layers 3 and 29, as captured."""
    taps = [("resid_post", layer) for layer in (3, 29)]
    values = {tap: torch.ones(4, WIDTH, dtype=dtype) for tap in taps}
    return Activations(values, dict.fromkeys(taps, torch.arange(4)), [5] * 4, LAYERS)


def several() -> Any:
    """The output of a request with n = 4."""
    made = SeveralCompletions.__new__(SeveralCompletions)
    made.outputs = [SimpleNamespace()] * 4
    return made


def loud(scale: float) -> None:
    """Steer with a scale that drowns the stream, in a process that was not warned yet."""
    steer_module._has_warned = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScaleWarning)
        Steer(V, 3, scale)


def default_capture(layers: Any) -> DefaultCapture:
    """The capture of `LLM(layers=…)`."""
    return DefaultCapture.parse(layers, False, True, False, False)


NAN = np.array([np.nan, *V[1:]])
E = [Steer(V, layer) for layer in (1, 2, 3)]
# Works in every form of the vector.
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64)

# (number, what is written, the call).
WORKS: list[tuple[int, str, Callable[[], Any]]] = [
    (4, "layers=np.arange(3)", lambda: ask(Capture(np.arange(3)))),
    (4, "positions=a tensor", lambda: ask(Capture(3, positions=torch.tensor([0, 1])))),
    (5, "Capture(layer=, site=)", lambda: ask(Capture(layer=3, site="resid_pre"))),
    (5, "the same in a dict", lambda: ask({"layer": 3, "site": "resid_pre"})),
    (7, "TransformerLens's name", lambda: ask(Capture(sites="blocks.10.hook_resid_post"))),
    (7, "Hugging Face's path", lambda: ask(Capture(sites="model.layers.10"))),
    (10, "a vector [1, width]", lambda: ask(edits=Steer(V[None], 3))),
    (10, "a vector per layer", lambda: ask(edits=Steer(ROWS, range(LAYERS)))),
    (11, "Steer({14: v})", lambda: ask(edits=Steer({14: V}))),
    *(
        (12, f"a vector of {dtype}", lambda dtype=dtype: ask(
            edits=Steer(torch.ones(WIDTH, dtype=dtype), 3)
        ))
        for dtype in DTYPES
    ),
    (12, "requires_grad", lambda: ask(edits=Steer(torch.ones(WIDTH, requires_grad=True), 3))),
    (16, "a negative scale", lambda: ask(edits=Steer(V, 3, -2))),
    (17, "scale=torch.tensor(2.)", lambda: ask(edits=Steer(V, 3, torch.tensor(2.0)))),
    (32, "Role('system')", lambda: ask(Capture(3, positions=Role("system")), prompt=CHAT)),
    (38, "acts[TransformerLens's name]", lambda: rows()["blocks.3.hook_resid_post"]),
    (38, "acts[3]", lambda: rows()[3]),
    (38, "acts['resid_post']", lambda: rows()["resid_post"]),
    (39, "acts['resid_post', -1]", lambda: rows()["resid_post", -1]),
    (40, "acts.numpy() of bfloat16", lambda: rows(torch.bfloat16).numpy()),
]  # fmt: skip

# (number, what is written, the call, its error, parts of the message).
Row = tuple[int, str, Callable[[], Any], type[Exception], list[str]]
REJECTED: list[Row] = [
    (1, "layer 99", lambda: ask(Capture([99])), SpecError,
     ["capture[0].layers: layer 99 is out of range", "30 layers, expected 0 to 29"]),
    (2, "layers='14'", lambda: Capture("14"), SpecError,
     ['layers: expected "all" or layer indices', "'14'"]),
    (3, "layers=[14.0]", lambda: Capture([14.0]), SpecError,
     ["layers[0]: expected `int`, got `float`"]),
    (6, "sites='resid-post'", lambda: Capture(3, "resid-post"), SpecError,
     ["sites:", "did you mean `resid_post`?"]),
    (7, "hook_pattern", lambda: ask(Capture(sites="blocks.10.attn.hook_pattern")), SpecError,
     ["no site here", 'Attention(layers, reduce="full")']),
    (7, "hook_z, which is not tapped", lambda: ask(Capture(sites="blocks.10.attn.hook_z")),
     SpecError, ["z at layer 10 is not tapped", "`sites`"]),
    (7, "layers in both", lambda: ask(Capture(3, sites="blocks.10.hook_resid_post")), SpecError,
     ["the names of the sites have layer 10; omit it"]),
    (8, "a site that is not tapped", lambda: ask(Capture(3, "mlp_out")), SpecError,
     ["mlp_out at layer 3 is not tapped", 'LLM(…, midstream={"sites"']),
    (9, "a vector of another width", lambda: ask(edits=Steer(np.ones(7), 3)), SpecError,
     ["edits[0].vector: expected 8 numbers", "got 7"]),
    (10, "a vector per layer at one", lambda: ask(edits=Steer(ROWS, 3)), SpecError,
     ["one row per layer", "for 1 layer;", "layer=range(30)"]),
    (11, "Steer({14: v}, layer=14)", lambda: Steer({14: V}, 14), SpecError,
     ["layer: `vector` is a dict by layer", "omit it"]),
    (13, "NaN", lambda: Steer(NAN, 3), SpecError, ["vector[0]: expected a finite number, got nan"]),
    (15, "Ablate(0)", lambda: ask(edits=Ablate(0 * V, 3)), SpecError,
     ["directions[0]: the row is zero; expected a direction"]),
    (18, "coeff=", lambda: Steer(V, 3, coeff=4), SpecError, ["coeff:", "did you mean `scale`?"]),
    (18, "coeff in a dict", lambda: ask(edits={"op": "steer", "layer": 3, "coeff": 4}), SpecError,
     ["unknown field 'coeff' (did you mean `scale`?)"]),
    (19, "scale=1e8", lambda: loud(1e8), ScaleWarning, ["1.43e+09", 'norm="match"']),
    (20, "2 prompts, 2 edits", lambda: call(2, edits=E[:2]), SpecError,
     ["two ways", "[[a], [b]] for one each"]),
    (21, "2 prompts, 3 edits", lambda: call(2, edits=E), SpecError, ["flat list of 3", "two ways"]),
    (22, "2 prompts, 3 lists", lambda: call(2, edits=[[each] for each in E]), SpecError,
     ["3 entries for 2 prompts; give one, or one each"]),
    (23, "capture=[3, 4]", lambda: call(1, capture=[3, 4]), SpecError,
     ["capture:", "write Capture(layers=[3, 4])"]),
    (24, "capture='all'", lambda: ask("all"), SpecError, ['write Capture(layers="all")']),
    (25, "edits=v", lambda: ask(edits=V), SpecError, ["write for example Steer(vector, layer=14)"]),
    (25, "edits=lambda", lambda: ask(edits=lambda h: h), SpecError,
     ["a function is called by Local(fn, layer=14)", "Steer(vector, layer=14)"]),
    (26, "hooks=", lambda: to_vllm("generate", hooks=[]), SpecError,
     ["edits=… to change activations, capture=… to read them"]),
    (26, "AsyncLLM, hooks=", lambda: to_async(hooks=[]), SpecError, ["capture=… to read them"]),
    (26, "SamplingParams(steer=)", lambda: SamplingParams(steer=E[0]), SpecError,
     ["mean edits=Steer(vector, layer=…)?"]),
    (27, "a direction per layer, at all", lambda: ask(edits=Ablate(np.eye(8)[:3], "all")),
     SpecError, ["two ways", "subspace=True", "subspace=False"]),
    (29, "n=4, output.activations", lambda: several().activations, AttributeError,
     ["4 completions", "read output.outputs[i].activations"]),
    (31, "one generated token", lambda: ask(Capture(3, positions="generated"), max_tokens=1),
     SpecError, ["nothing is selected", "max_tokens is 1", "never fed back"]),
    (33, "Role('assistant') absent",
     lambda: ask(Capture(3, positions=Role("assistant")), prompt=CHAT), SpecError,
     ["its roles: 'system', 'user'"]),
    (33, "Role in generate", lambda: ask(Capture(3, positions=Role("user"))), SpecError,
     ["use chat() instead of generate()"]),
    (34, "Text('Berlin')", lambda: ask(Capture(3, positions=Text("Berlin"))), SpecError,
     ["the prompt does not contain 'Berlin'"]),
    (34, "Text('apit')", lambda: ask(Capture(3, positions=Text("apit"))), SpecError,
     ["not at token boundaries", "'The' 'capital' 'of'"]),
    (35, "position 50", lambda: ask(Capture(3, positions=50)), SpecError,
     ["the prompt has 4 tokens and max_tokens is 4", "from -4 to 6"]),
    (36, "'last_token'", lambda: Capture(3, positions="last_token"), SpecError,
     ['use "last_prompt" for the last token of the prompt']),
    (37, "an edit at 'last'", lambda: Steer(V, 3, positions="last"), SpecError,
     ["known only when generation has ended", '"last_prompt"']),
    (38, "acts[layer that is not there]", lambda: rows()[4], KeyError, ["layers 3, 29"]),
    (38, "acts['resid-post']", lambda: rows()["resid-post"], KeyError, ["mean `resid_post`?"]),
    (40, "bfloat16 .numpy()", lambda: rows(torch.bfloat16)[3].numpy(), TypeError, ["BFloat16"]),
    (41, "two probes without names", lambda: ask(probes=[Probe(V, 3), Probe(V, 4)]), SpecError,
     ["probes[1].name", "name of probes[0]; use another"]),
    (42, "an unknown name", lambda: ask(edits=Steer("happy")), SpecError,
     ["no vectors are registered as 'happy'; registered: none"]),
    (43, "a .pt file", lambda: VectorRegistry(SHAPE).register("v", "v.pt"), SpecError,
     ["pickles, which can run code", "safetensors.torch.save_file"]),
    (43, "Steer('v.safetensors')", lambda: ask(edits=Steer("v.safetensors", 3)), SpecError,
     ["llm.vectors.register(name, path)"]),
    (44, "a gate on a later layer",
     lambda: ask(edits=Gate(Steer(V, 3), Reading(V, layer=5), 0.5)), SpecError,
     ["reads resid_post of layer 5, which is computed after resid_post of layer 3"]),
    (45, "a plan in both", lambda: merged_plan(
        Plan.make(capture=Capture(3)), SamplingParams(capture=Capture(3))
     ), SpecError, ["give it in one place"]),
    (46, "extra_args={'midstrem': …}", lambda: check_extra_args({"midstrem": {"capture": {}}}),
     SpecError, ["extra_args['midstrem']", "did you mean `midstream`?"]),
    (47, "body {'midstreem': …}", lambda: check_body({"midstreem": {}}, ()), SpecError,
     ["midstreem:", "did you mean `midstream`?"]),
    (49, "midstream={'site': …}", lambda: Config.parse({"site": ["resid_post"]}), ConfigError,
     ["midstream: unknown field 'site' (did you mean `sites`?)"]),
    (50, "LLM(layers=[99])", lambda: default_capture([99]).check(SHAPE), SpecError,
     ["layers: layer 99 is out of range", "0 to 29"]),
    (57, "beam_search(capture=)", lambda: LLM.beam_search(object(), capture=Capture(3)), SpecError,
     ["unsupported in beam_search", "use generate"]),
    (58, "a release of SAEs", lambda: SAE.load("gemma-scope-2b-pt-res-canonical"), SpecError,
     ["cfg.json", "give its id too: SAE.load(release, sae_id)"]),
]  # fmt: skip
# Of vLLM or torch alone (14, 28, 53, 54), over an engine (30, 48, 51, 55, 56), or below (52).
ELSEWHERE = {14, 28, 30, 48, 51, 52, 53, 54, 55, 56}


def test_what_can_only_mean_one_thing_works() -> None:
    for _, _, made in WORKS:
        made()


def test_a_mistake_is_rejected_with_what_to_write() -> None:
    for number, written, made, error, words in REJECTED:
        with pytest.raises(error) as caught:
            made()
        said = str(caught.value)
        assert [word for word in words if word not in said] == [], (number, written, said)


def test_every_mistake_has_its_row() -> None:
    assert {row[0] for row in [*WORKS, *REJECTED]} | ELSEWHERE == set(range(1, 59))


def test_a_layer_is_meant_by_its_digits() -> None:
    assert ask(edits=Steer({"14": V})).edits[0].layer == 14
    assert ask(edits=Ablate({"-1": V})).edits[0].layer == LAYERS - 1
    with pytest.raises(SpecError, match="layer 14 is listed twice"):
        Steer({"14": V, 14: V})
    for key in ("014", "1.0", "+1", "", "1" * 5000, "¹"):
        with pytest.raises(SpecError, match="unknown field"):
            Steer({key: V})


@pytest.fixture
def spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get processes of their own, which import the script."""
    # Not the environment, of which vLLM keeps a copy once an engine has started.
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", True)
    monkeypatch.setitem(vars(envs), "VLLM_WORKER_MULTIPROC_METHOD", "spawn")


@pytest.mark.usefixtures("spawns")
def test_a_script_without_a_guard_ends_the_engines_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_script()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit, match="put the script's body under `if __name__ ==") as caught:
        check_script()
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()


@pytest.mark.usefixtures("spawns")
def test_a_script_from_standard_input_is_rejected_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__="<stdin>"))
    with pytest.raises(UnsupportedError, match="from standard input; save it as a file"):
        check_script()
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()
