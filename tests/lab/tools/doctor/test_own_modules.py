"""vLLM's own modules as a reference, on models in vLLM's form that are run here."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from midstream import Replace, Steer
from midstream.lab.tools.doctor import formulas
from midstream.lab.tools.doctor.compare import row_error
from midstream.lab.tools.doctor.module_hooks import BOTH, FIRST, NoOwnModules
from midstream.lab.tools.doctor.own_modules import OwnModules
from midstream.sites import OUTER

WIDTH, VOCABULARY, COUNT = 16, 11, 2
PROMPT = [3, 1, 4, 1, 5]
VECTOR = torch.linspace(-1, 2, WIDTH).square()


class Mix(nn.Module):
    """A branch, in attention's or the MLP's place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        return torch.tanh(x @ self.weight) + x.cumsum(dim=0) / 10


class Norm(nn.Module):
    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        normed = nn.functional.layer_norm(total, (WIDTH,))
        return normed if residual is None else (normed, total)


class Fused(nn.Module):
    """As vLLM's Llama: the halves of the stream are summed in the norms."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.self_attn, self.norm_2, self.mlp = Norm(), Mix(), Norm(), Mix()

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual = hidden
            hidden = self.norm_1(hidden)
        else:
            hidden, residual = self.norm_1(hidden, residual)
        hidden, residual = self.norm_2(self.self_attn(hidden), residual)
        return self.mlp(hidden), residual


class Dead(Fused):
    """As vLLM's Cohere: side by side, and the second half is not read."""

    def forward(self, positions, hidden, residual):
        normed = self.norm_1(hidden)
        return hidden + self.self_attn(normed) + self.mlp(normed), hidden


class Scaled(Fused):
    """As vLLM's Granite: what a branch gives is not what the stream gets."""

    def forward(self, positions, hidden, residual):
        hidden = hidden + 0.2 * self.self_attn(self.norm_1(hidden))
        return hidden + 0.2 * self.mlp(self.norm_2(hidden)), None


class Beside(Fused):
    """As vLLM's Step3: shared experts are a child beside the MLP."""

    def __init__(self):
        super().__init__()
        self.share_expert = Mix()

    def forward(self, positions, hidden, residual, experts=None):
        shared = self.share_expert if experts is None else experts[0]
        residual = hidden if residual is None else hidden + residual
        hidden, residual = self.norm_2(self.self_attn(self.norm_1(residual)), residual)
        return shared(hidden) + self.mlp(hidden), residual


class Visited(Beside):
    """As vLLM's Mobius: called with experts that layers share."""


class LogitsProcessor(nn.Module):
    def forward(self, rows):
        return rows[:, :VOCABULARY]


class VocabParallelEmbedding(nn.Embedding):
    """vLLM's name of it."""


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([kind() for _ in range(COUNT)])
        self.norm, self.logits_processor = Norm(), LogitsProcessor()
        self.given = [nn.ModuleList([Mix()])] if kind is Visited else []

    def forward(self, ids):
        hidden, residual = self.embedding(ids), None
        for layer in self.layers:
            hidden, residual = layer(ids, hidden, residual, *self.given)
        if residual is None or type(self.layers[0]) is Dead:
            return self.norm(hidden)
        return self.norm(hidden, residual)[0]


class Engine:
    """Runs `model` for plain requests, and `tapped` for those with captures."""

    def __init__(self, model, tapped):
        self.model, self.tapped = model, tapped
        text = SimpleNamespace(vocab_size=VOCABULARY)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
        self.info = SimpleNamespace(shape=SimpleNamespace(num_layers=COUNT, hidden_size=WIDTH))

    def apply_model(self, function):
        return [function(self.model)]

    @torch.no_grad()
    def generate(self, prompts, sampling, use_tqdm, **plan):
        model = self.tapped if plan else self.model
        rows = model(torch.tensor(prompts[0]["prompt_token_ids"]))
        token = int(model.logits_processor(rows[-1:]).argmax())
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])]


def reference(kind):
    torch.manual_seed(2)
    made = OwnModules(Engine(Model(kind), Model(kind)))
    made.find_sites(PROMPT)
    return made


def test_sites_of_a_layer_with_two_halves_are_found_by_sums():
    own = reference(Fused)
    assert all(own.missing((site, layer)) is None for site in OUTER for layer in range(COUNT))
    assert {own.missing((site, 0)) for site in ("embed", "final_norm")} == {None}
    assert own._halves[0, True] == BOTH
    seen = own.run(PROMPT)
    for layer in range(COUNT):
        rows = {site: seen.values[site, layer] for site in OUTER}
        assert row_error(rows["resid_pre"] + rows["attn_out"], rows["resid_mid"]) < 1e-6
        assert row_error(rows["resid_mid"] + rows["mlp_out"], rows["resid_post"]) < 1e-6
    assert torch.equal(seen.values["resid_post", 0], seen.values["resid_pre", 1])
    assert torch.equal(seen.values["embed", 0], seen.values["resid_pre", 0])


def test_a_second_half_that_nothing_reads_is_no_part_of_the_stream():
    own = reference(Dead)
    assert own._halves[0, True] == FIRST
    assert own.missing(("resid_mid", 0)) is not None
    assert own.missing(("attn_out", 0)) is own.missing(("mlp_out", 0)) is None


def test_a_branch_that_the_layer_scales_is_not_compared():
    own = reference(Scaled)
    assert "what the sums need" in str(own.missing(("attn_out", 0)))
    assert own.missing(("attn_in", 0)) is own.missing(("resid_post", 1)) is None
    assert "are not compared" in str(own.missing(("q", 0)))


@pytest.mark.parametrize("kind", [Fused, Dead])
@pytest.mark.parametrize("edit", [Steer(VECTOR, layer=0), Replace(VECTOR, layer=0)])
def test_an_edit_changes_its_tap_by_its_definition_and_what_comes_after(kind, edit):
    own = reference(kind)
    plain = own.run(PROMPT)
    for site in OUTER:
        if own.missing((site, 1)) is not None:
            continue
        seen = own.run(PROMPT, {(site, 1): lambda rows: formulas.apply(edit, rows)})
        assert row_error(seen.before[site, 1], plain.values[site, 1]) < 1e-6
        wanted = formulas.apply(edit, plain.values[site, 1])
        assert row_error(seen.values[site, 1], wanted) < 1e-6
        assert row_error(seen.values["final_norm", 1], plain.values["final_norm", 1]) > 1e-2
        assert torch.equal(seen.values["resid_post", 0], plain.values["resid_post", 0])


def test_an_engine_with_one_model_is_none_to_compare_with():
    model = Model(Fused)
    with pytest.raises(NoOwnModules, match="keeps no model without taps"):
        OwnModules(Engine(model, model)).find_sites(PROMPT)


def test_an_engine_in_another_process_is_none_to_compare_with():
    engine = Engine(Model(Fused), Model(Fused))
    own = OwnModules(engine)
    engine.model = Model(Fused)
    with pytest.raises(NoOwnModules, match="do not run in this process"):
        own.find_sites(PROMPT)


@pytest.mark.parametrize("kind", [Beside, Visited])
def test_an_edit_of_what_the_mlp_reads_reaches_the_other_modules_that_read_it(kind):
    own = reference(kind)
    layer, plain = own.layers[1], own.run(PROMPT)
    shared = own._model.given[0][0] if kind is Visited else layer.share_expert
    edit = Steer(VECTOR, layer=1)
    seen = own.run(PROMPT, {("mlp_in", 1): lambda rows: formulas.apply(edit, rows)})
    read = formulas.apply(edit, plain.values["mlp_in", 1]).float()
    with torch.no_grad():
        wanted = plain.values["resid_mid", 1] + shared(read) + layer.mlp(read)
    assert row_error(seen.values["resid_post", 1], wanted) < 1e-6
    assert own.missing(("mlp_out", 1)) is not None


def test_the_layers_are_those_of_the_language_model_not_of_a_tower_with_as_many():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList([Mix() for _ in range(COUNT)])
            self.language_model = Model(Fused)
            self.logits_processor = self.language_model.logits_processor

        def get_language_model(self):
            return self.language_model

        def forward(self, ids):
            return self.language_model(ids)

    whole = Whole()
    assert OwnModules(Engine(whole, whole)).layers == list(whole.language_model.layers)
