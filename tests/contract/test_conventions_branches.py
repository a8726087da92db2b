"""Where the table finds what attention and MLP add to the stream, against the models' sources.

As `test_conventions`, which see: nothing is imported, and each release is read. It is enough if one
call of a module is as the table says: which branch of its forward a layer takes is what a `Choice`
decides.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import class_node, class_texts, each_convention, family_of, sets

from midstream.runtime.models.convention import Entry, hybrid, single
from midstream.runtime.models.registry import (
    CONVENTIONS,
    Choice,
    Half,
    Input,
    Lack,
    LayerConvention,
    Output,
    Refusal,
    Returns,
    lookup,
)
from midstream.sites import NAMES

each_release = pytest.mark.usefixtures("release")

# What changes no value: in evaluation, and (the last two) wherever the table has no refusal.
NEUTRAL = ("dropout", "view", "_cast_for_residual", "sp_reduce_scatter")


def methods(path: Path, node: ast.ClassDef, dotted: str) -> Iterator[ast.FunctionDef]:
    """The methods that may call a sub-module: the layer's, or any of the file's for one deeper."""
    names = class_texts(path) if "." in dotted else ()
    others = [found for name in names if (found := class_node(path, name))]
    for owner in others or [node]:
        yield from (
            item
            for item in owner.body
            if isinstance(item, ast.FunctionDef) and item.name != "__init__"
        )


def statements(body: list[ast.stmt], beside: ast.stmt | None = None) -> Iterator[ast.stmt]:
    """The simple statements in the order of the source; of an `if` around `beside`, only the
    branch which that is in.
    """
    for item in body:
        inner = [part for part in (getattr(item, "body", []), getattr(item, "orelse", [])) if part]
        taken = [part for part in inner if any(beside in ast.walk(each) for each in part)]
        for part in taken or inner:
            yield from statements(part, beside)
        if not inner:
            yield item


def calls(item: ast.AST, attribute: str, aliases: set[str]) -> list[ast.Call]:
    """Calls of `self.<attribute>`, also under a local name, also by a fused all-reduce."""
    found = []
    for call in ast.walk(item):
        if not isinstance(call, ast.Call):
            continue
        function = ast.unparse(call.func)
        fused = function.startswith("fused_allreduce_") and f"self.{attribute}" in map(
            ast.unparse, call.args
        )
        if function == f"self.{attribute}" or function in aliases or fused:
            found.append(call)
    return found


def aliases_of(lines: list[ast.stmt], attribute: str) -> set[str]:
    """Local names of `self.<attribute>`, as in `ffn = self.moe if self.is_moe else self.mlp`."""
    return {
        ast.unparse(line.targets[0])
        for line in lines
        if isinstance(line, ast.Assign)
        and isinstance(line.value, (ast.IfExp, ast.Attribute))
        and any(ast.unparse(part) == f"self.{attribute}" for part in ast.walk(line.value))
    }


def each_call(
    path: Path, node: ast.ClassDef, dotted: str
) -> Iterator[tuple[ast.FunctionDef, list[ast.stmt], int, ast.Call]]:
    """(method, its statements, the number of the one that calls, the call)."""
    attribute = dotted.rpartition(".")[2]
    for method in methods(path, node, dotted):
        lines = list(statements(method.body))
        aliases = aliases_of(lines, attribute)
        for line in lines:
            for call in calls(line, attribute, aliases):
                near = list(statements(method.body, line))
                yield method, near, near.index(line), call


def loads(item: ast.AST, name: str) -> int:
    return sum(
        isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load)
        for part in ast.walk(item)
    )


def stores(item: ast.stmt, name: str) -> bool:
    return any(
        isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store)
        for part in ast.walk(item)
    )


def is_fresh(method: ast.FunctionDef, lines: list[ast.stmt], number: int, call: ast.Call) -> bool:
    """Whether nobody else reads the tensor that the call is given first."""
    if not call.args:
        return False
    given = call.args[0]
    if not isinstance(given, ast.Name):
        return isinstance(given, ast.Call)
    before = [n for n, line in enumerate(lines[:number]) if stores(line, given.id)]
    if not before:
        # A method of the layer's own that is given what the norm returned.
        return method.name.startswith("_")
    made = lines[before[-1]]
    value = made.value if isinstance(made, ast.Assign) else None
    if isinstance(value, ast.Tuple):
        value = value.elts[0]
    if not isinstance(value, (ast.Call, ast.BinOp)):
        return False
    between = sum(loads(line, given.id) for line in lines[before[-1] + 1 : number])
    rest = loads(lines[number], given.id) - 1
    if not stores(lines[number], given.id):
        for line in lines[number + 1 :]:
            rest += loads(line, given.id)
            if stores(line, given.id):
                break
    return between + rest == 0


def is_added(lines: list[ast.stmt], number: int, call: ast.Call) -> bool:
    """Whether what the call returns, or the first item of that, is added to something as it is."""
    name, line = "", lines[number]
    wrapped = any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) and call in ast.walk(part)
        for part in ast.walk(line)
    )
    if wrapped or isinstance(line, ast.Return):
        return True
    for later in lines[number:]:
        if isinstance(later, ast.AugAssign) and ast.unparse(later.target) == name:
            return isinstance(later.op, ast.Add)
        if name and loads(later, name):
            text = ast.unparse(later)
            scaled = [
                part
                for part in ast.walk(later)
                if isinstance(part, ast.BinOp)
                and isinstance(part.op, ast.Mult)
                and loads(part, name)
            ]
            if scaled:
                return False
            if any(
                isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) and loads(part, name)
                for part in ast.walk(later)
            ):
                return True
            if f"({name}, residual" in text:  # a fused norm adds first
                return True
            passes = any(word in text for word in NEUTRAL) or text.endswith(f"= {name}")
            if not passes and not text.endswith((f"= {name}[0]", "is not None")):
                return False
        if later is line or (name and loads(later, name)):
            if not isinstance(later, ast.Assign):
                return False
            target = later.targets[0]
            target = target.elts[0] if isinstance(target, ast.Tuple) else target
            name = ast.unparse(target)
    return False


def places(
    *kinds: type,
) -> Iterator[tuple[str, str, Path, ast.ClassDef, LayerConvention, Input | Output]]:
    for name, path, node, convention in each_convention():
        for site, place in convention.branches.items():
            if isinstance(place, kinds):
                yield f"{name} {site}", site, path, node, convention, place


# ---------------------------------------------------------------- the table


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
def test_the_mlp_is_called_with_a_tensor_that_is_its_own_or_gets_a_copy() -> None:
    wrong = []
    for name, _, path, node, _, place in places(Input):
        assert isinstance(place, Input)
        found = list(each_call(path, node, place.path))
        if not any(call.args for *_, call in found):
            wrong.append((name, "its input comes by keyword"))
        if not place.shared and not any(is_fresh(*each) for each in found):
            wrong.append((name, "others read it too"))
    assert not wrong


@each_release
def test_what_a_module_returns_is_added_as_it_is() -> None:
    wrong = []
    for name, site, path, node, _, place in places(Output):
        found = [
            (lines, number, call) for _, lines, number, call in each_call(path, node, place.path)
        ]
        if site != "mlp_in" and not any(is_added(*each) for each in found):
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
            [item for item in call.args if ast.unparse(item) != f"self.{convention.mid}"]
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
                    and ast.unparse(call.func).startswith(("self.", "meta_mlp"))
                    for call in ast.walk(line)
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
            for site in NAMES:
                reason = leaf.lack(site)
                assert reason is None or len(reason) > 10, (key, site)
                if reason and "does not know" in reason:
                    lacking.append((key, site))
    assert not lacking


# ---------------------------------------------------------------- these checks themselves


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


@pytest.mark.parametrize(
    ("text", "fresh"),
    [
        (" h = self.norm(h)\n return self.mlp(h)", True),
        (" h, r = self.norm(h, r)\n h = self.mlp(h)\n return h, r", True),
        (" return r + self.mlp(self.norm(r))", True),
        (" r = h\n h = self.mlp(h)\n return h + r", False),
        (" h = self.norm(h)\n r = h\n h = self.mlp(h)\n return h + r", False),
        (" h = self.norm(h)\n a = self.attn(h)\n return a + self.mlp(h)", False),
        (" x = self.norm(h)\n m = self.mlp(x)\n return m + self.attn(x)", False),
        (" h = self.norm(h)\n return self.mlp(x=h)", False),
    ],
)
def test_a_tensor_that_others_read_is_told_from_one_that_is_the_mlps_own(
    text: str, fresh: bool
) -> None:
    method, lines = source(text)
    assert is_fresh(method, lines, *only_call(lines, "mlp")) is fresh


@pytest.mark.parametrize(
    ("text", "added"),
    [
        (" h = self.mlp(h)\n return r + h", True),
        (" h, _ = self.mlp(h)\n h = self.dropout(h)\n h = r + h\n return h", True),
        (" h = self.mlp(h)\n h += r\n return h", True),
        (" return r + self.mlp(h)", True),
        (" h = self.mlp(h)\n return r + h * self.multiplier", False),
        (" h = self.mlp(h)\n h = self.post_norm(h)\n return r + h", False),
        (" _, h = self.mlp(h)\n return r + h", False),
        (" m, b = self.mlp(h)\n h = m * 2 + r\n return h", False),
    ],
)
def test_a_sum_is_told_from_a_scaled_or_normed_one(text: str, added: bool) -> None:
    _, lines = source(text)
    assert is_added(lines, *only_call(lines, "mlp")) is added


# ---------------------------------------------------------------- choices


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


def test_a_mixer_that_is_no_attention_adds_no_attn_out_and_keeps_the_rest() -> None:
    module = "transformers.models.qwen3_next.modeling_qwen3_next"
    for kind, reason in (
        ("linear_attention", "a linear-attention layer has no attention"),
        ("full_attention", None),
    ):
        convention = found(module, "Qwen3NextDecoderLayer", block_type=kind)
        assert convention.lack("attn_out") == reason
        assert [site for site in NAMES if site != "attn_out" and convention.lack(site)] == []


def test_a_lone_mixer_has_the_branch_that_it_is() -> None:
    module = "vllm.model_executor.models.nemotron_h"
    attention = found(module, "NemotronHAttentionDecoderLayer")
    assert attention.attn_out is Half.AT_EXIT
    assert "no MLP" in (attention.lack("mlp_out") or "")
    mlp = found(module, "NemotronHMoEDecoderLayer")
    assert mlp.branches["mlp_in"] == Input("mixer")
    assert mlp.mlp_out is Half.AT_EXIT
    mamba = found(module, "NemotronHMambaDecoderLayer")
    assert mamba.lack("attn_out") == "a Mamba layer has no attention"
    assert mamba.lack("mlp_in") == mamba.lack("mlp_out") == "a Mamba layer has no MLP"


def test_branches_that_are_scaled_as_they_are_added_are_lacking_and_mlp_in_is_not() -> None:
    granite = found("vllm.model_executor.models.granite", "GraniteDecoderLayer")
    assert "scaled where it is added" in (granite.lack("attn_out") or "")
    assert "scaled where it is added" in (granite.lack("mlp_out") or "")
    assert granite.lack("mlp_in") is None


def test_a_sum_over_ranks_that_comes_later_matters_with_several_ranks_only() -> None:
    cohere = found("vllm.model_executor.models.commandr", "CohereDecoderLayer")
    assert cohere.lack("attn_out") is None
    assert "use tensor_parallel_size=1" in (cohere.lack("attn_out", tensor_parallel=True) or "")
    assert cohere.lack("mlp_in", tensor_parallel=True) is None


def test_a_choice_may_ask_for_a_value() -> None:
    choice = hybrid("kind", single("norm"), "no attention here", equals="mamba")
    for value, reason in (("mamba", "no attention here"), ("attention", None), ("", None)):
        convention = choice.resolve(layer_of("x", "Layer", kind=value))
        assert isinstance(convention, LayerConvention)
        assert convention.lack("attn_out") == reason
    assert isinstance(choice.resolve(layer_of("x", "Layer")), Refusal)


def test_phi_gpt2_and_llama_are_as_their_sources_have_them() -> None:
    llama = found("vllm.model_executor.models.llama", "LlamaDecoderLayer")
    assert list(llama.branches.values()) == [Half.AT_MID, Input("mlp"), Half.AT_EXIT]
    gpt2 = found("vllm.model_executor.models.gpt2", "GPT2Block")
    assert list(gpt2.branches.values()) == [Output("attn"), Input("mlp"), Output("mlp")]
    phi = found("transformers.models.phi.modeling_phi", "PhiDecoderLayer")
    assert phi.returns is Returns.SINGLE
    assert list(phi.branches.values()) == [
        Output("self_attn"), Input("mlp", shared=True), Output("mlp"),
    ]  # fmt: skip
    longcat = found("vllm.model_executor.models.longcat_flash", "FlashDecoderLayer")
    assert all(isinstance(place, Lack) for place in longcat.branches.values())
