"""Finding a model's decoder layers, and refusing what is not understood."""

import pytest
from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models import decoder as decoder_module
from midstream.runtime.models.convention import (
    Choice,
    Lack,
    LayerConvention,
    Output,
    Refusal,
    Returns,
    pair,
    single,
)
from midstream.runtime.models.decoder import all_lacks, find_decoder
from midstream.runtime.models.registry import CONVENTIONS, LAYER_LISTS
from midstream.runtime.models.trunk_ends import NoEnd

KNOWN = single("norm")


def layer_class(name="Layer", *bases, **namespace):
    """A layer class as vLLM's `model_executor/models/tests_own.py` would define it."""

    def forward(self, hidden_states):
        return hidden_states

    module = "vllm.model_executor.models.tests_own"
    forward.__module__, forward.__qualname__ = module, f"{name}.forward"
    namespace = {"__module__": module, "__qualname__": name, "forward": forward, **namespace}
    return type(name, bases or (nn.Module,), namespace)


@pytest.fixture
def known(monkeypatch):
    """Makes layer classes of some convention."""

    def make(convention=KNOWN, name="Layer", **namespace):
        key = "model_executor.models.tests_own", name
        monkeypatch.setitem(CONVENTIONS, key, convention)
        return layer_class(name, **namespace)

    return make


def holding(path, layers):
    """A model whose `path` is a list of those layers."""
    model = root = type("SomeForCausalLM", (nn.Module,), {})()
    *folders, last = path.split(".")
    for name in folders:
        setattr(root, name, nn.Module())
        root = getattr(root, name)
    setattr(root, last, nn.ModuleList(layers))
    return model


def find(model, tensor_parallel_size=1, float16=False):
    return find_decoder(model, tensor_parallel_size, float16)


@pytest.mark.parametrize("path", LAYER_LISTS)
def test_layers_are_found_wherever_models_keep_them(known, path):
    cls = known()
    decoder = find(holding(path, [cls() for _ in range(3)]))
    assert decoder.num_layers == 3
    assert [layer.index for layer in decoder.layers] == [0, 1, 2]
    assert all(layer.convention is KNOWN for layer in decoder.layers)
    assert decoder.lacking == {}


def test_what_a_model_lacks_is_known_of_every_site_and_stops_no_model_that_cannot_be_read(
    known, monkeypatch
):
    asked = []

    def lacks(layer):
        asked.append(layer)
        return {"router": Lack("it has no router")}

    model = holding("model.layers", [known()() for _ in range(2)])
    monkeypatch.setattr(decoder_module, "find_inner_sites", lacks)
    monkeypatch.setattr(decoder_module, "find_end", lambda *_: NoEnd("it is not known"))
    assert all_lacks(model, 1, False) == {
        ("router", 0): "it has no router", ("router", 1): "it has no router",
        ("embed", 0): "it is not known", ("final_norm", 1): "it is not known",
        ("logits", 1): "it is not known",
    }  # fmt: skip
    assert len(asked) == 2
    assert find(model).lacking == {}, "sites inside are looked for only where one is asked for"

    def breaks(layer):
        raise KeyError("source")

    monkeypatch.setattr(decoder_module, "find_inner_sites", breaks)
    assert all_lacks(model, 1, False) == {}


def test_the_layers_are_those_of_the_language_model_where_there_are_several(known):
    cls, tower = known(), known(Refusal("it is of a vision tower"), "TowerLayer")
    language = holding("model.layers", [cls(), cls()])
    model = holding("model.layers", [tower()])
    model.get_language_model = lambda: language
    assert [type(layer.module) for layer in find(model).layers] == [cls, cls]


def test_a_list_that_is_empty_or_no_module_list_is_passed_over(known):
    model = holding("model.layers", [])
    with pytest.raises(UnsupportedError, match="SomeForCausalLM: its decoder layers were not fou"):
        find(model)
    model.layers = nn.ModuleList([known()()])
    assert find(model).num_layers == 1
    plain = nn.Module()
    plain.layers = [known()()]
    with pytest.raises(UnsupportedError, match="were not found"):
        find(plain)


def test_a_model_without_layers_is_refused_with_the_places_looked_at():
    with pytest.raises(UnsupportedError) as caught:
        find(nn.Linear(2, 2))
    assert str(caught.value).startswith("Linear: its decoder layers were not found; looked for")
    for path in LAYER_LISTS:
        assert path in str(caught.value)


@pytest.mark.parametrize("missing", ["PPMissingLayer", "Identity"])
def test_layers_of_other_pipeline_stages_are_skipped_and_keep_their_numbers(known, missing):
    cls, gone = known(), type(missing, (nn.Identity,), {})
    decoder = find(holding("model.layers", [gone(), gone(), cls(), cls(), gone()]))
    assert decoder.num_layers == 5
    assert [layer.index for layer in decoder.layers] == [2, 3]
    nothing = find(holding("model.layers", [gone(), gone()]))
    assert (nothing.layers, nothing.num_layers) == ((), 2)


def test_an_unknown_class_is_refused_by_name(known):
    model = holding("model.layers", [known()(), layer_class("StrangerLayer")()])
    message = (
        "layer 1 of SomeForCausalLM, a StrangerLayer, cannot be tapped: midstream does not know "
        "what model_executor.models.tests_own.StrangerLayer takes and returns; say it with "
        "midstream.layers.register_layer"
    )
    with pytest.raises(UnsupportedError) as caught:
        find(model)
    assert str(caught.value) == message


def test_a_class_that_overrides_forward_is_not_taken_for_its_base(known):
    base = known()
    inherits = layer_class("Inherits", base)
    del inherits.forward
    overrides = layer_class("Overrides", base)
    assert find(holding("model.layers", [inherits()])).layers[0].convention is KNOWN
    with pytest.raises(UnsupportedError, match="does not know what .*Overrides takes"):
        find(holding("model.layers", [overrides()]))


def test_a_class_of_the_same_name_elsewhere_is_unknown(known):
    known()
    other = layer_class("Layer", __module__="someone.elses.plugin")
    with pytest.raises(UnsupportedError, match=r"does not know what someone\.elses\.plugin\.Layer"):
        find(holding("model.layers", [other()]))


@pytest.mark.parametrize(
    ("convention", "setting", "message"),
    [
        (Refusal("it carries several streams"), None, "layer 0 of .* tapped: it carries several"),
        (
            pair("norm", tp_partial=True),
            {"tensor_parallel_size": 2},
            r"a partial sum .*; use tensor_parallel_size=1",
        ),
        (
            LayerConvention(Returns.SINGLE, mid="norm", float16_scaled=True),
            {"float16": True},
            r"scaled-down stream in float16.*dtype=bfloat16",
        ),
    ],
)
def test_what_cannot_be_tapped_is_refused_under_its_setting_only(
    known, convention, setting, message
):
    model = holding("model.layers", [known(convention)()])
    if setting is not None:
        assert len(find(model).layers) == 1
    with pytest.raises(UnsupportedError, match=message):
        find(model, **(setting or {}))


PARTIAL = {
    "deepseek_v32.nvidia.model.DeepseekV32DecoderLayer": "DeepSeek-V3.2 and GLM-5",
    "deepseek_v32.amd.model.DeepseekV32DecoderLayer": "the same on ROCm",
    "minimax_m3.nvidia.model.MiniMaxM3DecoderLayer": "MiniMax-M3",
    "minimax_m3.amd.model.MiniMaxM3DecoderLayer": "the same on ROCm",
}
STREAMS = [
    *(
        f"{folder}.model.DeepseekV4DecoderLayer"
        for folder in (
            "deepseek_v4.amd",
            "deepseek_v4.cpu",
            "deepseek_v4.nvidia",
            "deepseek_v4.xpu",
            "deepseek_v41.amd",
            "deepseek_v41.nvidia",
        )
    ),
    *(f"glm5next.{folder}.model.Glm5NextDecoderLayer" for folder in ("common", "nvidia")),
]


def vendor_layer(name):
    """A layer of a class as vLLM's file of that name under `vllm/models` defines it."""
    module, _, cls = name.rpartition(".")

    def forward(self, hidden_states):
        return hidden_states

    module = f"vllm.models.{module}"
    forward.__module__, forward.__qualname__ = module, f"{cls}.forward"
    namespace = {"__module__": module, "__qualname__": cls, "forward": forward}
    namespace |= {"is_moe_layer": False}
    return type(cls, (nn.Module,), namespace)()


@pytest.mark.parametrize("name", PARTIAL, ids=str)
def test_models_whose_reduction_is_left_to_the_next_layer_are_refused_by_name(name):
    model = holding("model.layers", [vendor_layer(name)])
    cls = name.rpartition(".")[2]
    with pytest.raises(UnsupportedError, match=f"layer 0 of .*, a {cls}, returns a partial sum"):
        find(model, tensor_parallel_size=2)
    assert len(find(model).layers) == 1


@pytest.mark.parametrize("name", STREAMS)
def test_models_whose_streams_hyper_connections_mix_are_refused_and_say_what_is_missing(name):
    with pytest.raises(UnsupportedError, match="cannot be tapped: its streams are mixed by hyper"):
        find(holding("model.layers", [vendor_layer(name)]))


def test_several_streams_are_parts_of_the_vectors_where_a_layer_begins_and_ends(known):
    cls = known(single("norm", streams="mixer.count"))

    def layer():
        made = cls()
        made.norm, made.mixer = nn.LayerNorm(6), nn.Module()
        made.mixer.count = 3
        return made

    decoder = find_decoder(
        holding("model.layers", [layer(), layer()]), 1, False, ["resid_mid", "resid_post"]
    )
    assert set(decoder.inner) == {("resid_post", 0), ("resid_post", 1)}
    place = decoder.inner["resid_post", 1]
    assert (place.width, place.heads, place.ranks, place.streams) == (18, 3, "whole", True)


def test_a_scaled_down_stream_is_refused_in_float16_only(known):
    cls = known(LayerConvention(Returns.SINGLE, mid="norm", float16_scaled=True))
    model = holding("model.layers", [cls()])
    assert len(find(model).layers) == 1
    with pytest.raises(UnsupportedError, match=r"scaled-down stream in float16.*dtype=bfloat16"):
        find(model, float16=True)


def test_sites_that_a_layer_lacks_are_listed_with_the_reason(known):
    whole = known()
    lone = known(single(no_mid="one mixer", mlp=Lack("it has no MLP")), "Lone")
    late = known(single("norm", no_pre="a copy is read", attn=Lack("it is scaled")), "Late")
    decoder = find(holding("model.layers", [whole(), lone(), late()]))
    assert decoder.lacking == {
        ("resid_mid", 1): "one mixer",
        ("mlp_in", 1): "it has no MLP",
        ("mlp_out", 1): "it has no MLP",
        ("resid_pre", 2): "a copy is read",
        ("attn_out", 2): "it is scaled",
    }


def test_a_branch_that_is_a_partial_sum_is_lacking_under_tensor_parallelism_only(known):
    cls = known(single("norm", attn=Output("self_attn", partial=True)))
    model = holding("model.layers", [cls()])
    assert find(model).lacking == {}
    [(tap, reason)] = find(model, tensor_parallel_size=2).lacking.items()
    assert tap == ("attn_out", 0)
    assert "a partial sum under tensor parallelism" in reason
    assert "use tensor_parallel_size=1" in reason


def test_a_choice_is_made_for_each_layer_by_how_it_was_built(known):
    other = single(no_mid="parallel")
    cls = known(Choice("parallel", true=other, false=KNOWN))
    layers = [cls(), cls()]
    layers[0].parallel, layers[1].parallel = False, True
    decoder = find(holding("model.layers", layers))
    assert [layer.convention for layer in decoder.layers] == [KNOWN, other]
    with pytest.raises(UnsupportedError, match="it has no 'parallel', which decides"):
        find(holding("model.layers", [cls()]))
