"""The sources of vLLM and transformers, parsed and not imported, for checks of the tables."""

import ast
import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.runtime.models.convention import Choice, LayerConvention
from midstream.runtime.models.registry import CONVENTIONS
from midstream.runtime.models.vllm_layers import MODELS, VENDOR
from support.layer_releases import SINCE, UNTIL
from support.syntax import walk


@functools.cache
def package_path(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


_given: list[Path] = []


@contextlib.contextmanager
def sources_in(root: Path) -> Iterator[None]:
    """The sources of vLLM in another `vllm` folder than the installed one, for as long as this."""
    _given.append(root)
    try:
        yield
    finally:
        _given.pop()


def vllm_root() -> Path:
    return _given[-1] if _given else package_path("vllm")


def vllm_release() -> str:
    return release_of(vllm_root())


@functools.cache
def release_of(root: Path) -> str:
    version = re.search(r"= '(\d+\.\d+)", (root / "_version.py").read_text())
    assert version, "vLLM's _version.py is not as expected"
    return version[1]


# What is asked of a class again and again, by several tests and for several releases.
@functools.cache
def unparse(node: ast.AST) -> str:
    return ast.unparse(node)


@functools.cache
def class_texts(path: Path) -> dict[str, str]:
    """Top-level classes by name; to parse only the wanted ones is ten times as fast."""
    parts = re.split(r"^(?=[A-Za-z@#])", path.read_text(), flags=re.MULTILINE)
    matches = ((re.match(r"class (\w+)", part), part) for part in parts)
    return {match[1]: part for match, part in matches if match}


def class_node(path: Path, name: str) -> ast.ClassDef | None:
    text = class_texts(path).get(name)
    return None if text is None else _class_of(text)


@functools.cache
def _class_of(text: str) -> ast.ClassDef:
    """By the text, because most classes are the same in several releases."""
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def file_of(key: tuple[str, str]) -> Path:
    module = key[0]
    root = (
        package_path("transformers").parent if module.startswith("transformers.") else vllm_root()
    )
    return root / (module.replace(".", "/") + ".py")


def each_vllm_entry() -> Iterator[tuple[tuple[str, str], str]]:
    for table, prefix in ((MODELS, "model_executor.models."), (VENDOR, "models.")):
        for name in table:
            module, _, cls = name.rpartition(".")
            yield (prefix + module, cls), name


def is_in_this_release(name: str) -> bool:
    def number(release: str) -> int:
        return int(release.split(".")[1])

    now = number(vllm_release())
    first = next((number(r) for r, names in SINCE.items() if name in names), 0)
    last = next((number(r) for r, names in UNTIL.items() if name in names), 10**6)
    return first <= now <= last


def each_source() -> Iterator[tuple[tuple[str, str], ast.ClassDef]]:
    """Every class of the table that vLLM and the installed transformers have."""
    for key, name in each_vllm_entry():
        if is_in_this_release(name):
            node = class_node(file_of(key), key[1])
            assert node, f"vLLM {vllm_release()} has no {key}"
            yield key, node
    for key in CONVENTIONS:
        if key[0].startswith("transformers.") and file_of(key).exists():
            found = class_node(file_of(key), key[1])
            if found:
                yield key, found


def leaves_of(entry: object) -> Iterator[LayerConvention]:
    if isinstance(entry, Choice):
        yield from leaves_of(entry.true)
        yield from leaves_of(entry.false)
    elif isinstance(entry, LayerConvention):
        yield entry


def choices_in(entry: object) -> Iterator[Choice]:
    if isinstance(entry, Choice):
        yield entry
        yield from choices_in(entry.true)
        yield from choices_in(entry.false)


def entry_named(name: str) -> object:
    module, _, cls = name.rpartition(".")
    return CONVENTIONS[module, cls]


def each_convention() -> Iterator[tuple[str, Path, ast.ClassDef, LayerConvention]]:
    for key, node in each_source():
        for convention in leaves_of(CONVENTIONS[key]):
            yield ".".join(key), file_of(key), node, convention


def forward_of(node: ast.ClassDef) -> ast.FunctionDef | None:
    functions = (item for item in node.body if isinstance(item, ast.FunctionDef))
    return next((function for function in functions if function.name == "forward"), None)


def sets(node: ast.AST, attribute: str) -> bool:
    return any(
        isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and item.attr == attribute
        for item in walk(node)
    )


def family_of(path: Path, node: ast.ClassDef) -> list[ast.ClassDef]:
    """The class and those of its bases that the same module defines."""
    found = [node]
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else ""
        if base_node := class_node(path, name):
            found += family_of(path, base_node)
        elif name == "LlamaDecoderLayer" and (
            base_node := class_node(path.with_name("llama.py"), name)
        ):
            found.append(base_node)
    return found
