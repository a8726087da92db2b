"""Sounds in requests to a server: in base64 and as `data:` URLs, selected by number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support import serving, sounds, vision
from support.serving import Running

from midstream import Capture, Client, Media, Probe, Steer
from midstream.client import ServerError

pytest.importorskip("soundfile", reason="vLLM decodes sounds with it")

VECTOR = 4 * torch.randn(vision.HIDDEN, generator=torch.Generator().manual_seed(3))
LAYER = 2
SHORT = {"max_tokens": 1, "temperature": 0}
HEARD = [sounds.sound(1, 0.4), sounds.sound(2, 0.7)]
TEXT = (
    f"<|im_start|>user\nwhat is {sounds.MARK}<|im_end|>\n<|im_start|>assistant\nan owl<|im_end|>\n"
    f"<|im_start|>user\n{sounds.MARK}and there?<|im_end|>\n<|im_start|>assistant\n"
)


def chat() -> list[dict[str, Any]]:
    first, second = map(sounds.wav, HEARD)
    parts = (
        {"type": "input_audio", "input_audio": {"data": first, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{second}"}},
    )
    return [
        {"role": "user", "content": [{"type": "text", "text": "what is "}, parts[0]]},
        {"role": "assistant", "content": "an owl"},
        {"role": "user", "content": [parts[1], {"type": "text", "text": "and there?"}]},
    ]


@pytest.fixture(scope="module")
def path(tiny_models: Path) -> Path:
    return sounds.make(tiny_models)


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ["--max-model-len=1024", '--limit-mm-per-prompt={"audio": 2}']
    arguments = serving.command(vision.served(path), *options)
    with serving.running(arguments, tmp_path_factory.mktemp("sounds")) as running:
        yield running


def test_sounds_of_a_chat_are_selected_and_edited(server: Running, path: Path) -> None:
    oracle = sounds.SoundOracle(path)
    inputs = oracle.inputs(TEXT, HEARD)
    places = oracle.media_tokens(inputs)
    count = next(at for at in range(1, len(places)) if places[at] != places[at - 1] + 1)
    first, second = places[:count], places[count:]
    ids = inputs["input_ids"][0].tolist()
    end = ids.index(hf.AutoTokenizer.from_pretrained(path).encode("<|im_end|>")[0], second[-1])
    selected = {
        "first": ({"audio": 0}, first),
        "every": ({"audio": "all"}, places),
        "said": ({"text": "and there?"}, list(range(second[-1] + 2, end))),
    }
    probes = [Probe(VECTOR, LAYER, name=name, positions=one) for name, (one, _) in selected.items()]
    edit = Steer(VECTOR, 1, positions=Media(0, "audio"))
    capture = Capture([LAYER], positions=Media(1, kind="audio"))
    with Client(server.url) as client:
        for edits in ([], [edit]):
            output = client.chat(chat(), **SHORT, probes=probes, capture=capture, edits=edits)
            added = dict.fromkeys(first, VECTOR) if edits else {}
            rows, _ = oracle.run(inputs, 1, added)
            wanted = rows["resid_post", LAYER]
            for name, (_, where) in selected.items():
                assert output.probes.positions_of(name).tolist() == where, name
                scores = torch.as_tensor(output.probes[name])
                torch.testing.assert_close(scores, wanted[where] @ VECTOR, atol=1e-2, rtol=1e-3)
            assert output.activations.positions.tolist() == second
            found = torch.as_tensor(output.activations["resid_post", LAYER])
            torch.testing.assert_close(found, wanted[second], atol=1e-3, rtol=1e-3)
            spans = output.activations.positions_of_media
            assert [(span.kind, span.index, span.first, span.length) for span in spans] == [
                ("audio", 0, first[0], len(first)),
                ("audio", 1, second[0], len(second)),
            ]
            assert len({span.hash for span in spans} - {""}) == 2
        with pytest.raises(ServerError, match="audio 2 is out of range: the prompt has 2"):
            client.chat(chat(), **SHORT, capture=Capture([LAYER], positions=Media(2, "audio")))
