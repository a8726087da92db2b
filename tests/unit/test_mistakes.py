"""Mistakes of newcomers that no module's own tests show: each is rejected with what to write."""

import asyncio
import copy
import multiprocessing
import pickle
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from sklearn.linear_model import LogisticRegression
from support.refusals import refused_calls
from unit.store.making import entry, write
from vllm import envs

import midstream
from midstream import (
    LLM,
    Ablate,
    AsyncLLM,
    Capture,
    Client,
    Directions,
    Feature,
    Gate,
    Lens,
    Probe,
    Steer,
    open_store,
    stack,
)
from midstream.api.arguments import PromptArguments, check_names
from midstream.api.outputs import GenerateOutput
from midstream.api.sampling_params import SamplingParams
from midstream.client.protocol import body_of, upload_of
from midstream.config.config import Config
from midstream.config.sinks import plain_sinks
from midstream.errors import ConfigError, ScaleWarning, SpecError, StoreError, UnsupportedError
from midstream.lab.export import export_npz, export_parquet
from midstream.lab.fit.prompts import read_classes
from midstream.lab.fit.scores import LayerScore
from midstream.lab.fit.text_scores import score_steps
from midstream.lab.sweep import Sweep
from midstream.plan import ModelShape, Plan
from midstream.plan.operations import steer as steer_module
from midstream.results.activations import Activations
from midstream.results.probe_scores import Probes
from midstream.results.site_table import SiteTable
from midstream.runtime.frontend.request.call_plan import merged_plan
from midstream.runtime.frontend.request.prompt.inputs import conversations, list_prompts
from midstream.runtime.vllm.engine_rules import check_layers, check_script, named_model
from midstream.sae.sae import SAE
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering
from midstream.store import RowDataset
from midstream.store.selection import as_selection

V = np.arange(1.0, 9.0)
E = Steer(V, 1)
ANY = SimpleNamespace(generate=None)  # an engine that is not called


def to_async(**given: Any) -> None:
    asyncio.run(anext(AsyncLLM.generate(SimpleNamespace(_started=None), "abc", None, **given)))


def rows() -> Activations:
    """Rows of layers 3 and 29, as captured."""
    values = {("resid_post", layer): torch.ones(4, 8) for layer in (3, 29)}
    return Activations(values, dict.fromkeys(values, torch.arange(4)), [5] * 4, 30)


def to_async_with(params: Any) -> None:
    asyncio.run(anext(AsyncLLM.generate(SimpleNamespace(_started=None), "abc", params)))


def directions() -> Directions:
    return Directions(np.ones((2, 8), np.float32), (3, 4), scores={3: LayerScore(0.9, 0.8, 2.0)})


def sweep() -> Sweep:
    """A sweep that is only to be saved."""
    return object.__new__(Sweep)


def loud() -> None:
    """Steer with a scale that drowns the stream, in a process that was not warned yet."""
    steer_module._has_warned = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScaleWarning)
        Steer(V, 3, 1e8)


def test_a_mistake_is_rejected_with_what_to_write():
    capture, example = Capture(3), re.escape("Steer(vector, layer=14)")
    function = re.escape("a function is called by Local(fn, layer=14)")
    refused_calls(
        (lambda: Plan.make(edits=V), "write for example " + example),
        (lambda: Plan.make(edits=lambda h: h), f"{function}.*{example}"),
        (lambda: to_async(hooks=[]), "capture=… to read them"),
        (lambda: SamplingParams(steer=E), re.escape("mean edits=Steer(vector, layer=…)?")),
        *(
            (lambda word=word: Capture(3, positions=word), '"last_prompt", which is −1.*"last_row"')
            for word in ("last", "last_token")
        ),
        (lambda: Capture(3, tokens=[0]), "did you mean `positions`"),
        (
            lambda: merged_plan(Plan.make(capture=capture), SamplingParams(capture=capture)),
            "give it in one place",
        ),
        (
            lambda: SAE.load("gemma-scope-2b-pt-res-canonical"),
            "cfg.json.*give its id too: SAE.load",
        ),
    )
    words = SamplingParams
    refused_calls(
        (lambda: words(max_token=3), "did you mean max_tokens="),
        (lambda: words(max_new_tokens=3), "did you mean max_tokens="),
        (lambda: words(steering_vector={1: V}), "did you mean steering_vectors="),
        (lambda: words(captures=capture), "did you mean capture="),
        (lambda: LLM("m", layerz=[3]), "layerz: LLM.. has no such argument; did you mean layers="),
        (lambda: LLM("m", sites=["z"]), re.escape('mean midstream={"sites": …}')),
        (lambda: AsyncLLM(model="m", max_model_length=9), "did you mean max_model_len="),
        (lambda: to_async_with({"max_tokens": 3}), re.escape("SamplingParams(max_tokens=3), got")),
        (lambda: conversations("Hi"), re.escape('[{"role": "user", "content": "Hi"}]')),
        (lambda: conversations(["Hi"]), "got a text"),
        (lambda: np.asarray(rows()), re.escape('take one, as activations["resid_post", 3]')),
        (lambda: rows().save("rows.npz"), "ends in .safetensors, got 'rows.npz'.*numpy.savez"),
        (lambda: sweep().save("sweep.csv"), "ends in .json"),
    )
    for model in ("/nope", ".models/nope", "~/nope"):
        refused_calls((lambda model=model: LLM(model), f"no folder '{model}'"), error=ConfigError)
    of_one = r"one for each layer; take .best.vector or \[layer\].vector"
    refused_calls((lambda: directions().vector, of_one), error=AttributeError)
    refused_calls((loud, r"1.43e\+09.*norm=\"match\""), error=ScaleWarning)
    refused_calls((lambda: rows()["resid-post"], "mean `resid_post`"), error=KeyError)


def shape() -> ModelShape:
    return ModelShape(30, 8, [("resid_post", layer) for layer in range(30)])


def test_a_message_writes_what_was_meant():
    ready, d = Plan.make, directions()
    refused_calls(
        *(
            (lambda kind=kind: kind(3, V), "the vector is the first argument and the layer the")
            for kind in (Steer, Probe, Ablate)
        ),
        (lambda: Probe(LogisticRegression(), 3), "Probe.from_sklearn"),
        (lambda: Probe(torch.nn.Linear(8, 2), 3), "Probe.from_torch"),
        (lambda: Steer(rows(), 3), "take one tensor, as activations"),
        (lambda: Steer(V, "resid_post", 3), "site is given as sites='resid_post'"),
        (lambda: Capture("blocks.3.hook_mlp_out"), "given as sites='blocks.3.hook_mlp_out'"),
        (lambda: ready(edits="calm"), re.escape("Steer('calm')")),
        (lambda: ready(edits=Capture(3)), "got `Capture`; give it as capture=…"),
        (lambda: ready(edits=Probe(V, 3)), "got `Probe`; give it as probes=…"),
        (lambda: ready(capture=E), "got `Steer`; give it as edits=…"),
        (lambda: ready(probes=E), "got `Steer`; give it as edits=…"),
        (lambda: ready(probes=d.best), "a direction makes its own: .probe"),
        (lambda: ready(capture=d), "a direction makes its own"),
        (lambda: ready(edits={3: V}), "write Steer.{layer: vector"),
        (lambda: PromptArguments(steer={3: V}).plan(), "write Steer.{layer: vector"),
        (lambda: Capture(3, positions="first"), "use 0 for the first token"),
        (lambda: Capture(3, exclude="bos"), "use 0 for the first token"),
        *(
            (lambda word=word, site=site: Capture(3, word), f"did you mean `{site}`")
            for word, site in (("residual", "resid_post"), ("mlp", "mlp_out"), ("heads", "z"))
        ),
        (lambda: Capture([0], "resid_psot"), "did you mean `resid_post`"),
        (lambda: check_names("generate", ["max_tokens"]), r"mean SamplingParams\(max_tokens=…\)"),
        *(
            (lambda name=name: check_names("generate", [name]), re.escape(f"mean {meant}?"))
            for name, meant in (
                ("lens", "capture=Lens(…)"),
                ("norms", "capture=Norms(…)"),
                ("max_new_tokens", "SamplingParams(max_tokens=…)"),
                ("max_token", "SamplingParams(max_tokens=…)"),
                ("do_sample", "SamplingParams(temperature=0)"),
            )
        ),
        (lambda: SamplingParams(temp=0), "did you mean temperature="),
        (lambda: LLM("m", capture=[10]), re.escape("generate(prompt, capture=…)")),
        (lambda: LLM("m", edits=E), re.escape("mean generate(prompt, edits=…)")),
        (
            lambda: LLM("m", max_tokens=3),
            re.escape("mean generate(prompt, SamplingParams(max_tokens=…))"),
        ),
        (lambda: Capture(3, to="acts"), "did you mean `sink`"),
        (
            lambda: PromptArguments("resid_post").plan(),
            re.escape('give a list, or "all", as Capture("all", sites=\'resid_post\')'),
        ),
        (
            lambda: Feature("scope", 5, 1, value=2.0),
            "encoder: expected vectors, got `str`; a registered SAE is sae='scope', index=",
        ),
        (lambda: Steering(None).set(bass="calm"), "of Steering.set .did you mean `base`"),
        (lambda: Steering(None).set(decode="calm"), "did you mean `generated`"),
        (lambda: read_classes(ANY, ["a"], ["a"]), "negative: these are the positive prompts"),
        (lambda: SamplingParams(do_sample=False), "did you mean temperature=0"),
        (lambda: SamplingParams(num_return_sequences=2), "did you mean n=…"),
        (lambda: LLM("m", device="cpu"), "did you mean to leave it out"),
        (lambda: LLM("m", steering=True), "did you mean enable_steering=True"),
        (lambda: LLM("m", torch_dtype="auto"), "did you mean dtype=…"),
        (
            lambda: list_prompts(None),
            "expected a text, a list of texts or of token ids, got `None`",
        ),
        (lambda: list_prompts(torch.tensor([[1]])), "got `Tensor`; .* its .tolist"),
        (lambda: list_prompts([{"role": "user", "content": "Hi"}]), "give them to chat"),
        (lambda: stack(rows()), "outputs: expected a list of outputs, got `Activations`"),
        (lambda: next(score_steps(lambda: None, 3, None, None)), "texts: expected a list of texts"),
        (lambda: Directions.fit("org/model", ["a"], ["b"]), "llm: .*write LLM.'org/model'"),
        (lambda: Directions.fit(E, ["a"], ["b"]), "llm: expected an LLM, got `Steer`"),
        (lambda: read_classes(ANY, ["a"], None), "negative: missing: .* or pairs"),
    )
    assert list_prompts(np.array(["a", "b"])) == ["a", "b"]
    assert list_prompts([3, 4]) == [[3, 4]]
    pairs = [("a", "b"), SimpleNamespace(positive="c", negative="d")]
    assert read_classes(ANY, pairs, None) == (["a", "c"], ["b", "d"])
    with pytest.raises(KeyError, match="did you mean `resid_post`"):
        SiteTable.of(shape())["residual", 3]
    refused_calls(
        (lambda: Client("localhost:8000"), "base_url: .*got 'localhost:8000'; start with http://"),
        (lambda: plain_sinks({"store": "acts"}), "such as store:root=acts"),
        (lambda: check_layers(config_of(30), Config.parse({"layers": [30]})), "0 to 29"),
        error=ConfigError,
    )
    offline = LocalEntryNotFoundError("no snapshot"), OSError("We could not connect")
    for error in (*offline, HFValidationError("a name has one slash")):
        problem = pytest.raises(ConfigError, match="no folder 'org/m' here, .* give the path")
        with problem, named_model("org/m"):
            raise error
    for error, name in (
        (OSError(28, "disk full"), "org/m"),
        (offline[0], "/"),
        (ValueError(), "m"),
    ):
        with pytest.raises(type(error)) as caught, named_model(name):
            raise error
        assert caught.value is error
    for name, meant in (("SteeringVector", "Steer"), ("Directionss", "Directions")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}' .did you mean `{meant}`"):
            getattr(midstream, name)
    check_layers(config_of(30), Config.parse({"layers": [-30, 29]}))
    check_layers(config_of(None), Config.parse({"layers": [99]}))


def test_a_field_of_a_body_that_a_server_would_ignore_is_refused():
    refused_calls(
        (lambda: body_of({"max_token": 3}), "server ignores this field; did you mean max_tokens=…"),
        (lambda: body_of({"temprature": 0}), "did you mean temperature=…"),
        (lambda: body_of({"do_sample": False}), "did you mean temperature=0"),
        (
            lambda: body_of({}, messages="Hi"),
            re.escape('[{"role": "user", "content": "Hi"}], or c'),
        ),
        (lambda: upload_of("happy.safetensors"), "a client reads no files"),
    )
    others = dict.fromkeys(("steering", "guided_json", "capture_layers", "max_tokens", "x"), 1)
    assert body_of(others, prompt="Hi") == {**others, "prompt": "Hi"}
    client = Client("http://127.0.0.1:1")
    with pytest.raises(AttributeError, match="'generate': write client.complete"):
        _ = client.generate


def config_of(count: int | None) -> SimpleNamespace:
    """A vLLM configuration of a model with so many layers."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(num_hidden_layers=count),
        get_total_num_hidden_layers=lambda: count or 0,
    )
    return SimpleNamespace(model_config=model)


def test_an_attribute_of_another_tool_says_what_to_write(tmp_path: Path):
    write(tmp_path, [entry("a")])
    store, probes = open_store(tmp_path), Probes({"mood": torch.ones(2)}, {}, [5, 6])
    llm, output = object.__new__(LLM), object.__new__(GenerateOutput)
    for owner, name, remedy in (
        (rows(), "to", "take a tensor"),
        (rows(), "shape", "take a tensor"),
        (rows(), "tokens", "write activations.token_ids"),
        (probes, "mood", re.escape('write probes["mood"]')),
        (store, "to_pandas", "read_pandas"),
        (llm, "run_with_hooks", "changes activations"),
        (llm, "tokenizer", "get_tokenizer"),
        (llm, "num_layers", "llm.info.shape"),
        (llm, "set_control", "edits=directions.steer"),
        (llm, "trace", "capture="),
        (output, "text", re.escape("output.outputs[0].text")),
    ):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{remedy}"):
            getattr(owner, name)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'$"):
            _ = owner.nonsense
    for key in ("a", 0):
        with pytest.raises(StoreError, match=r"store.get\(id\)"):
            store[key]
    copied = pickle.loads(pickle.dumps(rows()))
    assert copied.layers == copy.deepcopy(rows()).layers == (3, 29)


def test_a_store_is_a_selection_of_all_its_rows(tmp_path: Path):
    write(tmp_path / "acts", [entry("a")])
    store = open_store(tmp_path / "acts")
    assert as_selection(store).taps == store.select().taps
    for make in (
        lambda value: RowDataset(value, 2),
        lambda value: export_npz(value, tmp_path / "npz"),
        lambda value: export_parquet(value, tmp_path / "rows.parquet"),
    ):
        for value in ("acts", 3, None):
            with pytest.raises(StoreError, match=r"expected what open_store\(folder\).select"):
                make(value)
    assert export_npz(store, tmp_path / "npz") != []


def test_what_was_refused_without_a_reason_is_accepted(tmp_path: Path):
    steer = Steer(V, layer=[3, 4], site="mlp_out")
    assert (steer.layer, steer.site, Steer(V, 3).layer) == ([3, 4], "mlp_out", 3)
    assert (Steer(V, site="embed").layer, Steer("calm").site) == (None, None)
    assert directions().best.layer == 3
    (one,) = [{("resid_post", 3): torch.ones(4, 8)}]
    single = Activations(one, dict.fromkeys(one, torch.arange(4)), [5] * 4, 30)
    assert np.asarray(single, np.float64).sum() == 32
    registry = VectorRegistry(ModelShape(4, 8, frozenset(("resid_post", n) for n in range(4))))
    registry["calm"] = {2: V}
    assert list(registry) == ["calm"]
    assert registry["calm"]["resid_post", 2].size == 8
    write(tmp_path / "acts", [entry("a")])
    store = open_store(tmp_path / "acts")
    assert len(store.select(layers=[3], sites="resid_post")) == 3
    with pytest.raises(SpecError, match="argument of Store.select .did you mean `position`"):
        store.select(positions=0)
    with pytest.raises(StoreError, match="no store: it has no shards .*, but acts"):
        open_store(tmp_path)


INTERNAL = [
    "bind",
    "bound",
    "instructions",
    "is_bound",
    "left",
    "names",
    "own",
    "per_layer",
    "steps",
    "resolve",
]


@pytest.mark.parametrize(
    "part",
    [E, Capture(1), Probe(V, 1), Gate(E, V, 0.5), Lens()],
    ids=lambda part: type(part).__name__,
)
def test_what_is_completed_of_a_part_of_a_plan_is_what_a_caller_needs(part: Any):
    shown = [name for name in dir(part) if not name.startswith("_")]
    assert not set(shown) & set(INTERNAL)
    assert {"to_dict", "parse"} <= set(shown)
    for name in shown:
        getattr(part, name)


def test_a_layer_is_meant_by_its_digits():
    assert Steer({"14": V}).layers.indices == (14,)
    assert Ablate({"-1": V}).layers.indices == (-1,)
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
def test_a_script_without_a_guard_ends_the_engines_process_with_one_line(monkeypatch):
    check_script()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit, match="put the script's body under `if __name__ ==") as caught:
        check_script()
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()


@pytest.mark.usefixtures("spawns")
def test_a_script_from_standard_input_is_rejected_before_a_process_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__="<stdin>"))
    with pytest.raises(UnsupportedError, match="from standard input; save it as a file"):
        check_script()
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()
