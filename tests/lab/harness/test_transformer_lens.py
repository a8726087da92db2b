"""The driver of TransformerLens's `RemoteBridge` without TransformerLens: names, prompts, edits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refused_calls

from midstream import Attention, Capture, Logits, Replace, Scale, Steer
from midstream.lab.harness.transformer_lens import Prompts, TransformerLensDriver
from midstream.plan.shape import ModelShape

WIDTH, LAYERS = 4, 3
SHAPE = ModelShape(
    LAYERS,
    WIDTH,
    {("embed", 0)} | {(s, n) for s in ("resid_post", "attn_out", "rot_q") for n in range(LAYERS)},
    widths={("rot_q", n): 8 for n in range(LAYERS)},
    heads={("rot_q", n): 2 for n in range(LAYERS)},
)


def component(aliases: dict[str, Any] | None = None, **inside: Any) -> Any:
    """A component of TransformerLens's adapters: it has hooks, some under two names, and parts."""
    hooks = {"hook_in": object(), "hook_out": object()}
    return SimpleNamespace(hook_aliases=aliases or {}, submodules=inside, **hooks)


def adapter(**more: Any) -> Any:
    attention = component(
        {"hook_q": "q.hook_out", "hook_z": ["out.hook_in", "o.hook_in"]},
        q=component(),
        o=component(),
    )
    attention.hook_pattern = attention.hook_rot_q = object()
    block = component(
        {
            "hook_resid_pre": "hook_in",
            "hook_resid_post": "hook_out",
            "hook_attn_out": "ln1_post.hook_out",
            "hook_resid_mid": "ln2.hook_in",
        },
        attn=attention,
        ln1_post=component(),
    )
    parts = {"embed": component(), "blocks": block, "ln_final": component(), **more}
    config = SimpleNamespace(architecture="LlamaForCausalLM")
    return SimpleNamespace(cfg=config, component_mapping=parts)


class Engine:
    """An engine that keeps what it is asked."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(shape=SHAPE)
        self.asked: list[Any] = []

    def generate(self, prompts: Any, params: Any, **arguments: Any) -> Any:
        self.asked.append((prompts, arguments))
        raise NotImplementedError


@pytest.fixture
def driver() -> TransformerLensDriver:
    return TransformerLensDriver(Engine(), adapter(), None)


def asked(driver: TransformerLensDriver, ids: Any, **arguments: Any) -> Any:
    """The prompts, and the arguments of the engine's `generate`."""
    with pytest.raises(NotImplementedError):
        driver.forward(ids, **arguments)
    return driver._llm.asked[-1]


def test_names_are_those_that_the_components_give_a_hook(driver: TransformerLensDriver) -> None:
    blocks = {"hook_out", "ln1_post.hook_out", "attn.hook_rot_q", "attn.hook_pattern"}
    tapped = {f"blocks.{n}.{name}" for n in range(LAYERS) for name in blocks}
    assert driver.supported_hook_points == tapped | {"embed.hook_out"}
    lacking = driver.non_fireable_hook_points
    assert {"blocks.0.hook_in", "blocks.0.hook_resid_pre", "ln_final.hook_out"} <= lacking
    assert {"blocks.1.attn.q.hook_out", "blocks.1.attn.o.hook_in", "unembed.hook_out"} <= lacking
    # A path to a part that the block does not have is no name.
    assert not {name for name in lacking if "ln2" in name or "attn.out" in name}
    assert not lacking & driver.supported_hook_points
    normed = TransformerLensDriver(Engine(), adapter(embed_ln=component()), None)
    assert "embed.hook_out" not in normed.supported_hook_points


def test_what_is_asked_of_the_engine(driver: TransformerLensDriver) -> None:
    names = (
        "blocks.1.hook_out",
        "blocks.0.hook_out",
        "embed.hook_out",
        "blocks.2.attn.hook_pattern",
    )
    prompts, named = asked(driver, torch.tensor([[5, 6, 7]]), capture=names)
    assert prompts == [[5, 6, 7]]
    assert named["capture"] == [
        [
            Logits(tokens="all", positions="prompt"),
            Capture([1, 0], "resid_post", "prompt"),
            Capture(sites="embed", positions="prompt"),
            Attention([2], queries="prompt", reduce="full"),
        ]
    ]
    assert named["edits"] is None
    prompts, named = asked(driver, [[5], [6, 7]], return_logits=False, edits=Steer([1.0] * 4, 1))
    assert (prompts, named["capture"]) == ([[5], [6, 7]], None)
    assert named["edits"] == [[Steer([1.0] * 4, 1)]] * 2


def test_interventions_are_edits_at_the_positions_of_tokens(driver: TransformerLensDriver) -> None:
    ones = np.ones(WIDTH, np.float32)
    mask = {"attention_mask": [[0, 0, 1, 1, 1]], "return_logits": False}
    for spec, edit in (
        ({"op": "suppress"}, Scale(0.0, 1)),
        ({"op": "scale", "factor": 2, "pos": None}, Scale(2.0, 1)),
        ({"op": "add", "value": 1.0}, Scale(1.0, 1, shift=ones)),
        (
            {"op": "add", "value": torch.zeros(4, dtype=torch.bfloat16)},
            Scale(1.0, 1, shift=0 * ones),
        ),
        ({"op": "set", "value": [[1, 1, 1, 1]], "pos": [2, 4]}, Replace(ones, 1, positions=[0, 2])),
        ({"op": "set", "value": 0, "pos": 3}, Replace(0 * ones, 1, positions=[1])),
    ):
        prompts, named = asked(
            driver, [[9, 9, 5, 6, 7]], intervene={"blocks.1.hook_out": spec}, **mask
        )
        assert prompts == [[5, 6, 7]]
        assert named["edits"] == [[edit]], spec
    _, named = asked(driver, [5], intervene={"embed.hook_out": {"op": "suppress"}})
    assert named["edits"] == [[Scale(0.0, site="embed")]]


def test_values_keep_the_places_of_their_tokens() -> None:
    prompts = Prompts.read([[1, 2, 3], [9, 4, 9]], [[1, 1, 1], [0, 1, 0]])
    assert (prompts.ids, prompts.starts, prompts.length) == ([[1, 2, 3], [4]], [0, 1], 3)
    rows = prompts.padded([torch.ones(3, 2), torch.ones(1, 2)], -np.inf)
    assert rows[:, :, 0].tolist() == [[1, 1, 1], [-np.inf, 1, -np.inf]]
    square = prompts.padded([torch.ones(2, 3, 3), torch.ones(2, 1, 1)], axes=(1, 2))
    assert square.shape == (2, 2, 3, 3)
    assert square[1, 0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    whole = torch.ones(2, 2)
    assert Prompts.read([1, 2], None).padded([whole]).data_ptr() == whole.data_ptr()


def test_what_the_engine_cannot_do_is_refused_by_name(driver: TransformerLensDriver) -> None:
    ids, name = [[5, 6, 7]], "blocks.1.hook_out"
    at, add = f"intervene['{name}']", {"op": "add", "value": 1.0}

    def run(**arguments: Any) -> Any:
        return lambda: driver.forward(arguments.pop("ids", ids), **arguments)

    def edit(spec: Any, name: str = name, **arguments: Any) -> Any:
        return run(intervene={name: spec}, **arguments)

    refused_calls(
        (run(max_new_tokens=2), "max_new_tokens", "expected 1"),
        (run(temperature=1), "temperature", "no such argument"),
        (run(ids=[["a"]]), "input_ids", "expected integers"),
        (run(ids=[[]]), "input_ids", "expected integers"),
        (run(ids=None), "input_ids", "expected integers"),
        (run(attention_mask=[[1, 0, 1]]), "attention_mask", "next to each other"),
        (run(attention_mask=[[0, 0, 0]]), "attention_mask", "next to each other"),
        (run(attention_mask=[[1, 2, 1]]), "attention_mask", "next to each other"),
        (run(attention_mask=[[1, 1]]), "attention_mask", "a number for each token"),
        (run(capture=["blocks.1.hook_ot"]), "capture", "did you mean `blocks.1.hook_out`"),
        (edit(add, "blocks.9.hook_out"), "intervene['blocks.9.hook_out']", "not among supported"),
        (edit(add, "blocks.1.attn.hook_pattern"), "can be read, and not changed"),
        (edit({"op": "clamp"}), at, "`suppress`, `scale`, `add`, `set`, got"),
        (edit(lambda x: x), at, "`suppress`"),
        (edit({"op": "scale"}), at, "factor"),
        (edit({"op": "scale", "factor": "a"}), f"{at}.factor", "expected a number"),
        (edit(add | {"position": 1}), at, "unknown field"),
        (edit(add | {"pos": 3}), f"{at}.pos", "expected positions 0 to 2, got .3."),
        (edit(add | {"pos": -1}), f"{at}.pos", "expected positions 0 to 2"),
        (edit(add | {"pos": True}), f"{at}.pos", "expected a position"),
        (edit(add | {"pos": []}), f"{at}.pos", "expected positions"),
        (edit(add | {"pos": 1}, ids=[[5, 6], [7, 8]], attention_mask=[[1, 1], [0, 1]]), "one at a"),
        (edit({"op": "set", "value": [1, 2]}), f"{at}.value", "a number or 4 numbers, got 2"),
    )
    driver.close()
    refused_calls((run(), "closed"))
