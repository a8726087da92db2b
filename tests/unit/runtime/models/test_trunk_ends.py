"""Where the embedding and the final norm are, by the source of the module with the layers."""

import importlib
import inspect
import linecache
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from midstream.runtime.models.convention import LayerConvention, Returns
from midstream.runtime.models.trunk_ends import NoEnd, find_end

KNOWN = LayerConvention(Returns.SINGLE, mid="norm")


class RMSNorm(nn.Module):
    pass


class Layer(nn.Module):
    pass


class IntermediateTensors(dict):
    pass


def first_rank() -> bool:
    return True


class Trunk(nn.Module):
    """As vLLM's models are written; the others differ from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 8)
        self.wpe = nn.Embedding(4, 8)
        self.project = None
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = RMSNorm()

    def embed_input_ids(self, input_ids: Any) -> Any:
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: Any, inputs_embeds: Any = None, tensors: Any = None) -> Any:
        if first_rank():
            if inputs_embeds is not None:
                hidden_states = inputs_embeds
            else:
                hidden_states = self.embed_input_ids(input_ids)
            residual = None
        else:
            hidden_states = tensors["hidden_states"]
            residual = tensors["residual"]
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        if not first_rank():
            return IntermediateTensors(hidden_states=hidden_states)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Scaled(Trunk):
    def embed_input_ids(self, input_ids: Any) -> Any:
        return self.embed_tokens(input_ids) * 8.0


class ScaledLater(Trunk):
    def forward(self, input_ids: Any, inputs_embeds: Any = None) -> Any:
        hidden_states = self.embed_tokens(input_ids)
        hidden_states *= 12.0
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class Positions(Trunk):
    def forward(self, input_ids: Any, positions: Any, inputs_embeds: Any = None) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        if self.project is not None:
            inputs_embeds, _ = self.project(inputs_embeds)
        hidden_states = inputs_embeds + self.wpe(positions)
        for _index in range(2):
            pass
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        if self.project is None:
            hidden_states = self.norm(hidden_states)
        return hidden_states, []


class ScaledPositions(Trunk):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.embed_tokens(input_ids) * 8.0 + self.wpe(positions)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class Normalised(Trunk):
    def forward(self, input_ids: Any) -> Any:
        hidden_states = self.norm(self.embed_input_ids(input_ids))
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states) * 2.0


class InPlace(Trunk):
    def forward(self, input_ids: Any) -> Any:
        hidden_states = self.embed_input_ids(input_ids)
        hidden_states.add_(1)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        hidden_states = self.norm(hidden_states)
        return hidden_states.float()


class CalledByNumber(Trunk):
    def forward(self, input_ids: Any) -> Any:
        hidden_states = self.embed_input_ids(input_ids)
        for number in range(2):
            hidden_states = self.layers[number](hidden_states)
        return self.norm(hidden_states)


class Mixing(Trunk):
    """As Solar, which changes the stream between layers."""

    def forward(self, input_ids: Any) -> Any:
        hidden_states = self.embed_input_ids(input_ids)
        for number in range(2):
            if number in self.mixed:
                hidden_states = hidden_states * 0.5
            layer = self.layers[number]
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class OtherLayers(Trunk):
    def forward(self, input_ids: Any) -> Any:
        hidden_states = self.embed_input_ids(input_ids)
        for number in range(2):
            hidden_states = self.blocks[number](hidden_states)
        return self.norm(hidden_states)


class Delegating(Trunk):
    def forward(self, input_ids: Any, inputs_embeds: Any = None, tensors: Any = None) -> Any:
        """As Mistral's, which gives its layers more."""
        return super().forward(input_ids, inputs_embeds, tensors=tensors)


class Scaling(Trunk):
    def forward(self, input_ids: Any, inputs_embeds: Any = None, tensors: Any = None) -> Any:
        return super().forward(input_ids, inputs_embeds * 2.0, tensors=tensors)


class Decorated(Trunk):
    @staticmethod
    def forward(input_ids: Any) -> Any:
        return input_ids


def find(trunk: nn.Module, site: str, given: bool = False) -> Any:
    model = nn.Module()
    model.model = trunk
    layers: Any = trunk.layers
    return find_end(site, model, layers, KNOWN, given)


@pytest.mark.parametrize("trunk", [Trunk, Scaled, ScaledLater, Delegating, CalledByNumber])
@pytest.mark.parametrize("given", [False, True])
def test_without_positions_the_first_layer_gets_the_embedding(trunk, given):
    one = trunk()
    assert find(one, "embed", given) is None
    assert find(one, "final_norm", given) is one.norm


def test_what_is_done_between_layers_leaves_the_final_norm_where_it_is():
    one = Mixing()
    assert find(one, "final_norm") is one.norm


def test_before_learned_positions_it_is_the_output_of_a_module():
    one = Positions()
    assert find(one, "embed") is one.embed_tokens
    assert find(one, "final_norm") is one.norm
    found = find(one, "embed", given=True)
    assert isinstance(found, NoEnd)
    assert "use resid_pre of layer 0" in found.reason
    one.project = nn.Linear(8, 8)
    assert "changes the embeddings before the first layer" in find(one, "embed").reason
    assert isinstance(find(one, "final_norm"), NoEnd)


@pytest.mark.parametrize(
    ("trunk", "site", "why"),
    [
        (ScaledPositions, "embed", "changes the embeddings before the first layer"),
        (Normalised, "embed", "changes the embeddings before the first layer"),
        (InPlace, "embed", "changes the embeddings before the first layer"),
        (ScaledPositions, "final_norm", "not the output of one norm"),
        (Normalised, "final_norm", "not the output of one norm"),
        (InPlace, "final_norm", "not the output of one norm"),
        (Scaling, "embed", "changes what it gives to its parent's forward"),
        (Mixing, "embed", "changes the embeddings before the first layer"),
        (OtherLayers, "embed", "no loop over its layers"),
        (Decorated, "embed", "decorated"),
        (Decorated, "final_norm", "decorated"),
    ],
)
def test_what_is_not_known_to_be_the_value_is_missing_with_the_reason(trunk, site, why):
    found = find(trunk(), site)
    assert isinstance(found, NoEnd)
    assert found.reason.startswith(f"{trunk.__name__} is not known to have it: ")
    assert why in found.reason


def test_a_forward_of_the_instance_is_not_followed():
    one = Trunk()
    one.forward = one.forward
    assert "its forward was replaced" in find(one, "final_norm").reason


def test_a_layer_whose_attention_does_not_see_its_entry_has_no_embedding():
    one, model = Trunk(), nn.Module()
    model.model = one
    late = LayerConvention(Returns.SINGLE, mid="norm", no_pre="a copy is read")
    found = find_end("embed", model, one.layers, late, False)
    assert isinstance(found, NoEnd)
    assert "a copy is read" in found.reason


def changing(body: str) -> type:
    """A trunk whose loop runs these statements, if a condition holds, before it calls a layer."""
    source = textwrap.dedent(inspect.getsource(Trunk.forward)).replace(
        "    for layer in self.layers:\n",
        "    for layer in self.layers:\n        if layer.is_odd:\n            " + body + "\n",
    )
    file = Path(tempfile.mkdtemp()) / "changing.py"
    file.write_text(source)
    names = {**vars(sys.modules[__name__])}
    exec(compile(source, str(file), "exec"), names)
    linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
    return type("Changing", (Trunk,), {"forward": names["forward"]})


@pytest.mark.parametrize(
    ("body", "is_known"),
    [
        ("hidden_states = hidden_states + residual", True),
        ("hidden_states = torch.cat([hidden_states, residual], dim=-1)", True),
        ("assert residual is not None; hidden_states = hidden_states.clone()", True),
        ("hidden_states = hidden_states * 2", False),
        ("residual = hidden_states; hidden_states = hidden_states + residual", False),
        ("hidden_states = hidden_states + residual if residual is not None else hidden_states * 2",
         False),
        ("hidden_states = torch.cat([hidden_states, tensors], dim=-1)", False),
    ],
)  # fmt: skip
def test_a_branch_that_fails_without_a_residual_is_not_taken_before_the_first_layer(body, is_known):
    found = find(changing(body)(), "embed")
    assert found is None if is_known else isinstance(found, NoEnd)


NO_NORM = "not the output of one norm"


@pytest.mark.parametrize(
    ("place", "embed", "norm"),
    [
        ("gpt_oss.GptOssModel", "", ""),
        ("llama.LlamaModel", "", ""),
        ("openpangu.OpenPanguModel", "", ""),
        ("deepseek_v2.DeepseekV2Model", "", ""),  # not before the first layer
        ("solar.SolarModel", "", ""),  # of some layers, not the first
        ("step3p5.Step3p5Model", "", NO_NORM),  # its head has the norm
    ],
)
def test_models_of_vllm_whose_loops_are_over_numbers_have_what_others_have(place, embed, norm):
    file, name = place.split(".")
    cls = getattr(importlib.import_module(f"vllm.model_executor.models.{file}"), name)
    one = cls.__new__(cls)
    nn.Module.__init__(one)
    one.layers = nn.ModuleList([Layer(), Layer()])
    one.embed_tokens = one.embedding = nn.Embedding(4, 8)
    one.norm = RMSNorm()
    for site, why, expected in (("embed", embed, None), ("final_norm", norm, one.norm)):
        found = find(one, site)
        if why:
            assert isinstance(found, NoEnd)
            assert why in found.reason
        else:
            assert found is expected
