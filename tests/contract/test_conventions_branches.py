"""Where the table finds what attention and MLP add: one call as it says is enough."""

import ast
from collections.abc import Iterator

import pytest
from contract.layer_calls import (
    aliases_of,
    attention_forwards,
    calls,
    each_call,
    given_to,
    is_added,
    is_fresh,
    places,
    statements,
    stores,
)
from support.sources import class_node, class_texts, each_convention, family_of, sets, unparse
from support.syntax import walk

from midstream.runtime.models.convention import (
    Choice,
    Entry,
    Half,
    Input,
    LayerConvention,
    Output,
    Refusal,
    hybrid,
    single,
)
from midstream.runtime.models.registry import CONVENTIONS, lookup
from midstream.sites import OUTER

each_release = pytest.mark.usefixtures("release")

# Others read the same tensor only in a branch that these layers do not take: where attention and
# MLP run in parallel, which the table has as shared, and where the mixer is no attention.
NOT_TAKEN = (
    "modeling_stablelm.StableLmDecoderLayer attn_in",
    "plamo2.Plamo2DecoderLayer attn_in",
)


@each_release
def test_each_named_module_is_set_by_the_layer_and_called_by_it() -> None:
    wrong = []
    for name, _, path, node, _, place in places(Input, Output):
        head, *rest = place.path.split(".")
        everything = class_texts(path) if rest else ()
        nodes = [found for other in everything if (found := class_node(path, other))]
        if not any(sets(item, head) for item in family_of(path, node)):
            wrong.append((name, f"{head} is not set"))
        if rest and not any(sets(item, rest[-1]) for item in nodes):
            wrong.append((name, f"{rest[-1]} is not set"))
        if not list(each_call(path, node, place.path)):
            wrong.append((name, f"{place.path} is never called"))
    assert not wrong


@each_release
def test_attention_and_mlp_are_called_with_a_tensor_that_is_their_own_or_get_a_copy() -> None:
    wrong = []
    for name, _, path, node, _, place in places(Input):
        assert isinstance(place, Input)
        forwards = attention_forwards(path, node)
        found = [
            (method, lines, number, given_to(call, lines, place, forwards))
            for method, lines, number, call in each_call(path, node, place.path)
        ]
        if not any(given for *_, given in found):
            wrong.append((name, "its input is not there"))
        own = any(is_fresh(*each) for each in found) or name.endswith(NOT_TAKEN)
        if not place.shared and not own:
            wrong.append((name, "others read it too"))
    assert not wrong


@each_release
def test_no_layer_calls_its_attention_past_the_module() -> None:
    wrong = []
    for name, site, _, node, _, place in places(Input):
        calls = (part for part in walk(node) if isinstance(part, ast.Call))
        past = [
            text
            for call in calls
            if (text := unparse(call.func)).startswith(f"self.{place.path}.")
            and not text.removeprefix(f"self.{place.path}.").startswith("get_")
        ]
        if site == "attn_in" and past:
            wrong.append((name, past))
    assert not wrong


@each_release
def test_attention_alone_reads_the_norms_output_where_that_is_its_input() -> None:
    wrong = []
    for name, site, path, node, _, place in places(Output):
        if site != "attn_in":
            continue
        for _, lines, number, _ in each_call(path, node, place.path):
            target = lines[number].targets[0]
            first = target.elts[0] if isinstance(target, ast.Tuple) else target
            reader = lines[number + 1]
            readers = [call for call in walk(reader) if isinstance(call, ast.Call)]
            given = [*readers[0].args, *(each.value for each in readers[0].keywords)]
            mine = unparse(first) in map(unparse, given)
            if not mine or not stores(reader, unparse(first)):
                wrong.append(name)
    assert not wrong


@each_release
def test_what_a_module_returns_is_added_as_it_is() -> None:
    wrong = []
    for name, site, path, node, _, place in places(Output):
        found = [
            (lines, number, call) for _, lines, number, call in each_call(path, node, place.path)
        ]
        if not site.endswith("_in") and not any(is_added(*each) for each in found):
            wrong.append(name)
    assert not wrong


@each_release
def test_the_first_half_is_attentions_only_where_mid_is_called_with_both_halves() -> None:
    wrong = []
    for name, path, node, convention in each_convention():
        if convention.attn_out is not Half.AT_MID:
            continue
        assert convention.mid, name
        values = [
            [item for item in call.args if unparse(item) != f"self.{convention.mid}"]
            for *_, call in each_call(path, node, convention.mid)
        ]
        if not any(len(each) == 2 for each in values):
            wrong.append(name)
    assert not wrong


@each_release
def test_the_norms_output_is_the_mlps_input_only_where_several_modules_read_it() -> None:
    wrong = []
    for name, site, path, node, _, place in places(Output):
        if site != "mlp_in":
            continue
        readers = 0
        for _, lines, number, _ in each_call(path, node, place.path):
            for line in lines[number + 1 :]:
                readers += sum(
                    bool(call.args)
                    and isinstance(call.args[0], ast.Name)
                    and unparse(call.func).startswith(("self.", "meta_mlp"))
                    for call in walk(line)
                    if isinstance(call, ast.Call)
                )
        if readers < 2:
            wrong.append(name)
    assert not wrong


def leaves(entry: Entry) -> Iterator[LayerConvention | Refusal]:
    if isinstance(entry, Choice):
        yield from leaves(entry.true)
        yield from leaves(entry.false)
    else:
        yield entry


def test_every_class_of_the_table_has_each_site_or_a_reason() -> None:
    lacking = []
    for key, entry in CONVENTIONS.items():
        for leaf in leaves(entry):
            if isinstance(leaf, Refusal):
                continue
            for site in OUTER:
                reason = leaf.lack(site)
                assert reason is None or len(reason) > 10, (key, site)
                if reason and "does not know" in reason:
                    lacking.append((key, site))
    assert not lacking


def source(text: str) -> tuple[ast.FunctionDef, list[ast.stmt]]:
    method = ast.parse("def forward(self, h, r):\n" + text).body[0]
    assert isinstance(method, ast.FunctionDef)
    return method, list(statements(method.body))


def only_call(lines: list[ast.stmt], attribute: str) -> tuple[int, ast.Call]:
    [(number, call)] = [
        (number, call)
        for number, line in enumerate(lines)
        for call in calls(line, attribute, aliases_of(lines, attribute))
    ]
    return number, call


def test_a_tensor_that_others_read_is_told_from_one_that_is_the_mlps_own() -> None:
    for text, fresh in (
        (" h = self.norm(h)\n return self.mlp(h)", True),
        (" h, r = self.norm(h, r)\n h = self.mlp(h)\n return h, r", True),
        (" return r + self.mlp(self.norm(r))", True),
        (" r = h\n h = self.mlp(h)\n return h + r", False),
        (" h = self.norm(h)\n r = h\n h = self.mlp(h)\n return h + r", False),
        (" h = self.norm(h)\n a = self.attn(h)\n return a + self.mlp(h)", False),
        (" x = self.norm(h)\n m = self.mlp(x)\n return m + self.attn(x)", False),
        (" h = self.norm(h)\n return self.mlp(x=h)", False),
    ):
        method, lines = source(text)
        number, call = only_call(lines, "mlp")
        given = given_to(call, lines, Input("mlp"), [])
        assert is_fresh(method, lines, number, given) is fresh, text


def test_what_attention_is_given_is_found_by_position_and_by_keyword() -> None:
    place, forwards = Input("attn", parameter="hidden_states"), [["positions", "hidden_states"]]
    for text, given in (
        (" return self.attn(positions, self.norm(h))", "self.norm(h)"),
        (" return self.attn(hidden_states=h, positions=positions)", "h"),
        (" kw = {'positions': r, 'hidden_states': h}\n return self.attn(**kw)", "h"),
        (" return self.attn(positions=positions)", None),
        (" return self.attn(positions)", None),
    ):
        _, lines = source(text)
        found = given_to(only_call(lines, "attn")[1], lines, place, forwards)
        assert (found and unparse(found)) == given, text


def test_a_sum_is_told_from_a_scaled_or_normed_one() -> None:
    for text, added in (
        (" h = self.mlp(h)\n return r + h", True),
        (" h, _ = self.mlp(h)\n h = self.dropout(h)\n h = r + h\n return h", True),
        (" h = self.mlp(h)\n h += r\n return h", True),
        (" return r + self.mlp(h)", True),
        (" h = self.mlp(h)\n return r + h * self.multiplier", False),
        (" h = self.mlp(h)\n h = self.post_norm(h)\n return r + h", False),
        (" _, h = self.mlp(h)\n return r + h", False),
        (" m, b = self.mlp(h)\n h = m * 2 + r\n return h", False),
    ):
        _, lines = source(text)
        assert is_added(lines, *only_call(lines, "mlp")) is added, text


def layer_of(module: str, name: str, **attributes: object) -> object:
    cls = type(name, (), {"__module__": module, "forward": lambda self: None})
    layer = cls()
    vars(layer).update(attributes)
    return layer


def found(module: str, name: str, **attributes: object) -> LayerConvention:
    layer = layer_of(module, name, **attributes)
    convention = lookup(type(layer), layer)
    assert isinstance(convention, LayerConvention)
    return convention


def test_a_mixer_that_is_no_attention_has_no_site_of_attention_and_keeps_the_rest() -> None:
    module = "transformers.models.qwen3_next.modeling_qwen3_next"
    for kind, reason in (
        ("linear_attention", "a linear-attention layer has no attention"),
        ("full_attention", None),
    ):
        convention = found(module, "Qwen3NextDecoderLayer", block_type=kind)
        assert convention.lack("attn_in") == convention.lack("attn_out") == reason
        others = set(OUTER) - {"attn_in", "attn_out"}
        assert [site for site in others if convention.lack(site)] == []


def test_a_lone_mixer_has_the_branch_that_it_is() -> None:
    module = "vllm.model_executor.models.nemotron_h"
    attention = found(module, "NemotronHAttentionDecoderLayer")
    assert attention.attn_in == Input("mixer", parameter="hidden_states")
    assert attention.attn_out is Half.AT_EXIT
    assert "no MLP" in (attention.lack("mlp_out") or "")
    mlp = found(module, "NemotronHMoEDecoderLayer")
    assert mlp.branches["mlp_in"] == Input("mixer")
    assert mlp.mlp_out is Half.AT_EXIT
    mamba = found(module, "NemotronHMambaDecoderLayer")
    assert mamba.lack("attn_in") == mamba.lack("attn_out") == "a Mamba layer has no attention"
    assert mamba.lack("mlp_in") == mamba.lack("mlp_out") == "a Mamba layer has no MLP"


def test_a_choice_may_ask_for_a_value() -> None:
    choice = hybrid("kind", single("norm"), "no attention here", equals="mamba")
    for value, reason in (("mamba", "no attention here"), ("attention", None), ("", None)):
        convention = choice.resolve(layer_of("x", "Layer", kind=value))
        assert isinstance(convention, LayerConvention)
        assert convention.lack("attn_out") == reason
    assert isinstance(choice.resolve(layer_of("x", "Layer")), Refusal)
