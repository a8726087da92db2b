"""The table of layer conventions against the parsed sources of each release."""

import ast
import functools
import re
from pathlib import Path

import pytest
from support.layer_releases import SINCE, UNTIL
from support.sources import (
    choices_in,
    class_node,
    class_texts,
    each_convention,
    each_source,
    each_vllm_entry,
    entry_named,
    family_of,
    file_of,
    forward_of,
    is_in_this_release,
    package_path,
    sets,
    unparse,
    vllm_root,
)
from support.syntax import tree_of, walk

from midstream.runtime.models.convention import Returns
from midstream.runtime.models.hf_layers import HF_MODELS
from midstream.runtime.models.registry import CONVENTIONS
from midstream.runtime.models.vllm_layers import MODELS, VENDOR

each_release = pytest.mark.usefixtures("release")

# Layer-like classes which are no decoder layers of a language model that is served.
NOT_LAYERS = re.compile(
    r"(mtp|eagle|dspark|dflash|vision|audio|encoder|bert|vit\b|siglip|clip|multimodal)"
    r"|Vision|Encoder|MultiToken|\.(DSV41MonoLayer|ExaoneBlockAttention)$"
)
# Their code comes with their weights, or has no release of transformers yet.
REMOTE_CODE = {"NanbeigeForCausalLM", "Kolibri1ForCausalLM"}


@each_release
def test_a_vllm_class_exists_in_just_the_releases_the_table_says() -> None:
    wrong = [
        name
        for key, name in each_vllm_entry()
        if (file_of(key).exists() and key[1] in class_texts(file_of(key)))
        != is_in_this_release(name)
    ]
    assert not wrong
    named = {name for table in (SINCE, UNTIL) for names in table.values() for name in names}
    assert named <= MODELS.keys() | VENDOR.keys()


def test_a_transformers_class_exists() -> None:
    version = re.search(
        r'__version__ = "(\d+\.\d+)', (package_path("transformers") / "__init__.py").read_text()
    )
    if not version or version[1] != "5.19":
        pytest.skip("the table was read from transformers 5.19")
    keys = [key for key in CONVENTIONS if key[0].startswith("transformers.")]
    assert len(keys) == len(HF_MODELS)
    assert not [key for key in keys if key[1] not in class_texts(file_of(key))]


@each_release
def test_forward_has_the_parameters_the_convention_names() -> None:
    wrong = []
    for name, _, node, convention in each_convention():
        forward = forward_of(node)
        assert forward, name
        parameters = {argument.arg for argument in forward.args.args}
        needed = {convention.hidden} | ({convention.residual} - {None})
        if not needed <= parameters:
            wrong.append((name, needed - parameters))
        if convention.returns is Returns.SINGLE and "residual" in parameters:
            wrong.append((name, {"an unexpected residual"}))
    assert not wrong


@each_release
def test_forward_returns_as_many_values_as_the_convention_says() -> None:
    wrong = []
    for name, _, node, convention in each_convention():
        forward = forward_of(node)
        assert forward, name
        for item in walk(forward):
            if not isinstance(item, ast.Return) or item.value is None:
                continue
            values = item.value.elts if isinstance(item.value, ast.Tuple) else [item.value]
            is_pair = len(values) == 2
            delegated = isinstance(item.value, ast.Call)
            ends_in_none = is_pair and (
                unparse(values[1]) == "None" or "residual = None" in unparse(forward)
            )
            right = {
                Returns.SINGLE: len(values) == 1,
                Returns.PAIR: is_pair or delegated,
                Returns.PAIR_DEAD: is_pair and not ends_in_none,
                Returns.PAIR_NONE: ends_in_none,
            }[convention.returns]
            if not right:
                wrong.append((name, unparse(item)))
    assert not wrong


@each_release
def test_a_pair_layer_takes_the_missing_residual_of_the_first_layer() -> None:
    wrong = []
    for name, _, node, convention in each_convention():
        text = unparse(node)
        live = re.search(r"residual is (not )?None", text) is not None
        optional = any(
            choice.attribute == "uses_rms_norm?" for choice in choices_in(entry_named(name))
        )
        if convention.returns is Returns.PAIR and not live and not optional:
            wrong.append(name)
        # Else the layer must overwrite whatever residual it was given before anything else.
        if convention.returns in (Returns.PAIR_DEAD, Returns.PAIR_NONE):
            forward = forward_of(node)
            assert forward, name
            body = [item for item in forward.body if not isinstance(item, ast.Expr)]
            if "residual = hidden_states" not in unparse(body[0]):
                wrong.append(name)
    assert not wrong


@each_release
def test_mid_is_a_module_the_layer_calls_with_the_stream_itself() -> None:
    """With a bare name, that is: an expression would be a copy that the skip misses."""
    wrong = []
    for name, path, node, convention in each_convention():
        if convention.mid is None:
            continue
        family = family_of(path, node)
        head, *rest = convention.mid.split(".")
        if not any(sets(item, head) for item in family):
            wrong.append((name, f"{head} is not set"))
        everything = filter(None, (class_node(path, other) for other in class_texts(path)))
        holders = list(everything) if rest else family
        last = convention.mid.rpartition(".")[2]
        if rest and not any(sets(item, last) for item in holders):
            wrong.append((name, f"{last} is not set"))
        calls = [
            item
            for holder in (holders if rest else [node])
            for item in walk(holder)
            if isinstance(item, ast.Call)
            and (
                unparse(item.func) == f"self.{last}"
                or (
                    unparse(item.func).startswith("fused_allreduce_")
                    and f"self.{last}" in map(unparse, item.args)
                )
            )
        ]
        if not calls:
            wrong.append((name, f"{last} is never called"))
        for call in calls:
            values = [item for item in call.args if unparse(item) != f"self.{last}"]
            if not 1 <= len(values) <= 2 or not all(isinstance(v, ast.Name) for v in values[:2]):
                wrong.append((name, unparse(call)))
    assert not wrong


@each_release
def test_a_single_stream_at_mid_is_what_the_skip_connection_keeps() -> None:
    wrong = []
    for name, _, node, convention in each_convention():
        calls = [
            call
            for call in walk(node)
            if isinstance(call, ast.Call) and unparse(call.func) == f"self.{convention.mid}"
        ]
        if any(len(call.args) > 1 for call in calls):
            continue
        streams = {unparse(call.args[0]) for call in calls}
        for stream in streams:
            aliases = {stream} | {
                unparse(item.targets[0])
                for item in walk(node)
                if isinstance(item, ast.Assign) and unparse(item.value) == stream
            }
            sums = (
                {unparse(item.left), unparse(item.right)}
                for item in walk(node)
                if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Add)
            )
            if not any(aliases & operands for operands in sums):
                wrong.append((name, stream))
    assert not wrong


@each_release
def test_what_a_choice_asks_for_is_set_by_the_layer() -> None:
    wrong = []
    for key, node in each_source():
        for choice in choices_in(CONVENTIONS[key]):
            if choice.attribute.endswith("?"):
                continue
            if not any(sets(item, choice.attribute) for item in family_of(file_of(key), node)):
                wrong.append((key, choice.attribute))
    assert not wrong


@each_release
def test_every_decoder_layer_of_vllm_is_in_the_table() -> None:
    missing = []
    files = [
        *(vllm_root() / "model_executor/models").glob("*.py"),
        *(vllm_root() / "models").rglob("*.py"),
    ]
    for path in files:
        module = ".".join(path.relative_to(vllm_root()).with_suffix("").parts)
        if NOT_LAYERS.search(module) or "def forward" not in path.read_text():
            continue
        for name in class_texts(path):
            if not re.search(r"(Layer|Block|Hybrid)$", name):
                continue
            node = class_node(path, name)
            forward = forward_of(node) if node else None
            if not forward:
                continue
            if re.search(r"Moe|MoE|Norm|MLP|HC\w+Layer|PLELayer", name) and "Decoder" not in name:
                continue
            parameters = {argument.arg for argument in forward.args.args}
            # That leaves out GPT-2's and OPT's, of one parameter.
            if not parameters & {"positions", "position_ids", "residual"}:
                continue
            if (module, name) in CONVENTIONS or NOT_LAYERS.search(f"{module}.{name}"):
                continue
            missing.append(f"{module}.{name}")
    assert not missing


def _registry(table: str) -> list[tuple[str, str]]:
    """(architecture, module) of one of the tables of vLLM's model registry."""
    tree = tree_of(vllm_root() / "model_executor/models/registry.py")
    for node in tree.body:
        if isinstance(node, ast.Assign) and unparse(node.targets[0]) == table:
            return [(arch, module) for arch, (module, _) in ast.literal_eval(node.value).items()]
    raise AssertionError(f"vLLM's registry has no {table}")


@functools.cache
def _imports(path: Path) -> frozenset[Path]:
    """The model files whose classes this one uses, itself included."""
    found = {path}
    imported = re.findall(r"^\s*from (\.*)([\w.]+) import\b", path.read_text(), re.MULTILINE)
    for dots, module in imported:
        base = path.parents[len(dots) - 1] if dots else vllm_root().parent
        target = base.joinpath(*module.split(".")).with_suffix(".py")
        if target.exists() and "models" in target.parts and "transformers" not in target.parts:
            found.add(target)
    return frozenset(found)


@each_release
def test_every_text_generation_model_of_the_registry_leads_to_the_table() -> None:
    missing = []
    tabled = {file_of(key) for key, _ in each_vllm_entry()}
    for architecture, module in _registry("_TEXT_GENERATION_MODELS"):
        if module.startswith("vllm."):
            package = vllm_root().parent / module.replace(".", "/")
            if not any(package in path.parents for path in tabled):
                missing.append((architecture, module))
            continue
        path = vllm_root() / "model_executor/models" / f"{module}.py"
        if "init_vllm_registered_model(" in path.read_text():
            continue  # it wraps another model of the registry
        near = _imports(path)
        reach = near.union(*map(_imports, near))
        if not reach & tabled:
            missing.append((architecture, module))
    assert not missing


@each_release
def test_every_model_that_vllm_leaves_to_transformers_is_in_the_table() -> None:
    registry = tree_of(vllm_root() / "model_executor/models/registry.py")
    supported = next(
        ast.literal_eval(node.value)
        for node in registry.body
        if isinstance(node, ast.Assign)
        and unparse(node.targets[0]) == "_TRANSFORMERS_SUPPORTED_MODELS"
    )
    auto = (package_path("transformers") / "models/auto/modeling_auto.py").read_text()
    folders = {arch: folder for folder, arch in re.findall(r'\("(\w+)", "(\w+)"\)', auto)}
    tabled = {name.partition(".")[0] for name in HF_MODELS}
    text_models = [arch for arch in supported if arch.endswith("ForCausalLM")]
    missing = [
        arch for arch in text_models if folders.get(arch) not in tabled and arch not in REMOTE_CODE
    ]
    assert text_models
    assert not missing
