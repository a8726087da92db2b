"""Positions in prompts with sounds, on a tiny model of sounds, compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import sounds
from support.engines import engine, greedy
from support.sounds import MARK, sound
from support.vision import HIDDEN, LAYERS, served

from midstream import Capture, Media, Positions, Probe, SpecError, Steer, Text

LAYER = 1
TOLERANCE = 1e-4
VECTOR = 4 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
FIRST, SECOND = sound(1, 0.4), sound(2, 0.7)
TEXT = f"the {MARK} and then {MARK} in the hat"


class Served(NamedTuple):
    llm: Any
    oracle: sounds.SoundOracle

    def ask(self, text: str, heard: list[np.ndarray], **plan: Any) -> Any:
        media = {"audio": [(samples, sounds.RATE) for samples in heard]}
        prompt = {"prompt": text, "multi_modal_data": media}
        return self.llm.generate([prompt], greedy(3), use_tqdm=False, **plan)[0]


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> Iterator[Served]:
    path = sounds.make(tiny_models)
    settings = {
        "max_model_len": 1024,
        "block_size": 32,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"audio": 2},
        "midstream": {"sites": ["embed", "resid_pre", "resid_post"]},
    }
    with engine(served(path), **settings) as llm:
        yield Served(llm, sounds.SoundOracle(path))


def far(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    assert rows.shape == wanted.shape
    return float(((rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def test_rows_before_at_between_and_after_sounds_are_those_of_transformers(model: Served) -> None:
    inputs = model.oracle.inputs(TEXT, [FIRST, SECOND])
    ids, places = inputs["input_ids"][0].tolist(), model.oracle.media_tokens(inputs)
    count = next(at for at in range(1, len(places)) if places[at] != places[at - 1] + 1)
    first, second = places[:count], places[count:]
    assert 4 <= len(first) < len(second) - 4
    before, between, after = (
        list(range(first[0] - 1)),
        list(range(first[-1] + 2, second[0] - 1)),
        list(range(second[-1] + 2, len(ids))),
    )
    wheres: dict[str, tuple[Any, list[int]]] = {
        "first": (Media(0, kind="audio"), first),
        "last": (Media(-1, kind="audio"), second),
        "every": ({"audio": "all"}, places),
        "between": (Text(" and then "), between),
        "after": (Text(" in the hat"), after),
        "others": (
            Positions("prompt", exclude=Media("all", "audio")),
            sorted(set(range(len(ids))) - set(places)),
        ),
    }
    probes = [
        Probe(VECTOR, layer=2, name=name, positions=where) for name, (where, _) in wheres.items()
    ]
    wanted, _ = model.oracle.run(inputs)
    scores = model.ask(TEXT, [FIRST, SECOND], probes=[probes]).probes
    for name, (_, selected) in wheres.items():
        assert scores.positions_of(name).tolist() == selected, name
        torch.testing.assert_close(
            scores[name], wanted["resid_post", 2][selected] @ VECTOR, atol=1e-2, rtol=1e-3
        )
    every = [*before, *first, *between, *second, *after]
    for where, selected in (
        (every, every),
        (Media(0, kind="audio"), first),
        ([Media(1, kind="audio")], second),
    ):
        capture = Capture("all", ["embed", "resid_pre", "resid_post"], positions=where)
        rows = model.ask(TEXT, [FIRST, SECOND], capture=[capture]).activations
        for layer in range(LAYERS):
            for site in ("resid_pre", "resid_post"):
                assert rows.positions_of(site, layer).tolist() == selected
                assert far(rows[site, layer], wanted[site, layer][selected]) < TOLERANCE, site
        assert far(rows["embed"], wanted["resid_pre", 0][selected]) < TOLERANCE
    # What replaces a sound's tokens is what the tower gave for that sound.
    assert far(rows["embed"], model.oracle.tower(SECOND)) < TOLERANCE
    one, other = rows.positions_of_media
    assert (one.kind, one.index, other.kind, other.index) == ("audio", 0, "audio", 1)
    for span, tokens in ((one, first), (other, second)):
        assert (span.first, span.length) == (tokens[0], len(tokens))


@pytest.mark.parametrize("where", [Media(0, "audio"), Media("all", "audio")])
def test_an_edit_at_sounds_is_a_hook_at_their_tokens(model: Served, where: Media) -> None:
    edit = Steer(VECTOR, LAYER, positions=where)
    every = Capture("all", ["resid_pre", "resid_post"])
    output = model.ask(TEXT, [FIRST, SECOND], capture=[every], edits=[edit])
    answer = list(output.outputs[0].token_ids)
    inputs = model.oracle.inputs(TEXT, [FIRST, SECOND], answer[:-1])
    spans = output.activations.positions_of_media[: 1 if where.index == 0 else 2]
    places = [span.first + nth for span in spans for nth in range(span.length)]
    rows, logits = model.oracle.run(inputs, LAYER, dict.fromkeys(places, VECTOR))
    for tap, wanted in rows.items():
        assert far(output.activations[tap], wanted) < TOLERANCE, tap
    last = len(output.prompt_token_ids) - 1
    assert answer == logits[last:].argmax(-1).tolist()
    plain, _ = model.oracle.run(inputs)
    assert far(plain["resid_post", 3][last:], rows["resid_post", 3][last:]) > 0.01


def test_a_cached_sound_serves_the_same_sound_alone(model: Served) -> None:
    """Two sounds of one length under one text have the same tokens."""
    text = f"the {MARK} in the hat, " + "the " * 30
    steer = Steer(VECTOR, LAYER, positions=Media(0, "audio"))
    probe = Probe(VECTOR, 3, positions=-1)
    model.llm.reset_prefix_cache()
    cached = []
    for heard in (sound(1), sound(7)) * 2:
        inputs = model.oracle.inputs(text, [heard])
        places = model.oracle.media_tokens(inputs)
        for edits in ([], [steer]):
            output = model.ask(text, [heard], probes=[probe], edits=edits)
            cached.append(output.num_cached_tokens)
            added = dict.fromkeys(places, VECTOR) if edits else {}
            rows, logits = model.oracle.run(inputs, LAYER, added)
            wanted = rows["resid_post", 3][-1:] @ VECTOR
            torch.testing.assert_close(output.probes["probe"], wanted, atol=1e-2, rtol=1e-3)
            assert output.outputs[0].token_ids[0] == int(logits[-1].argmax())
    assert cached[:4] == [0] * 4
    assert min(cached[4:]) > places[-1]


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        (Media(2, "audio"), "audio 2 is out of range: the prompt has 2 of this kind"),
        (Media(0, "image"), "the prompt has no image; it has audio"),
    ],
)
def test_media_that_a_prompt_lacks_are_refused(model: Served, where: Media, problem: str) -> None:
    with pytest.raises(SpecError, match=f"edits.0..positions.*{problem}"):
        model.ask(TEXT, [FIRST, SECOND], edits=[Steer(VECTOR, LAYER, positions=where)])
