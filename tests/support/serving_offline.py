"""The offline engine's results for the requests that tests send to a server, on twelve layers of
SmolLM2: a step of all thirty takes more than twice as long.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from midstream import (
    Ablate,
    Attention,
    Between,
    Capture,
    Client,
    Feature,
    Features,
    Gate,
    Lens,
    LogitDiff,
    Logits,
    Norms,
    Probe,
    Reconstruct,
    Steer,
)
from midstream.client import ServedOutput
from midstream.plan import AttentionPool, Classes, Flag, Mass, Reading, Stop, TopKeys
from midstream.results.readouts import RESULTS
from support import controlling
from support.compared import same_receipt
from support.sae_oracle import RandomSae
from support.serving import ENGINE, NAME

TOKENS = 6
WIDTH, LAYERS, TOP = 576, 12, 11
VECTOR = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
PARIS = "The capital of France is"
LAST = {"positions": ["last_prompt", "generated"]}
HELLO = [{"role": "user", "content": "Say hello."}]

ASKED = {"model": NAME, "temperature": 0, "max_tokens": TOKENS}


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a prompt or a conversation, and what it asks for, as arguments by name."""

    prompt: str | list[dict[str, str]]
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return isinstance(self.prompt, list)

    @property
    def captures(self) -> list[Any]:
        """What it captures and reads out."""
        found = self.asked.get("capture", ())
        return [*found] if isinstance(found, (list, tuple)) else [found]


CASES = {
    "plain": Case(PARIS),
    "plain chat": Case(HELLO),
    "everything": Case(
        PARIS,
        {
            "capture": Capture([10, TOP]),
            "probes": [Probe(VECTOR, 5, name="p"), Probe(VECTOR, 7, name="q", phase="generated")],
            "steer": Steer(VECTOR, 3, 0.1),
        },
    ),
    "edits": Case(
        "One, two, three,", {"edits": Ablate(VECTOR, layer=8), "capture": Capture([8, TOP])}
    ),
    "remembered": Case(
        "One, two, three,",
        {
            "edits": Gate(Steer(VECTOR, 8, 0.2), Reading(VECTOR, layer=5), hold=2, smooth=0.5),
            "capture": Capture([8]),
        },
    ),
    "codec": Case("Water boils at", {"capture": Capture([4], codec="full8")}),
    "last_row": Case("Water boils at", {"capture": Capture("all", positions="last_prompt")}),
    "reduced": Case(
        PARIS,
        {
            "capture": [
                Capture([3], positions="prompt", reduce="moments"),
                Capture([10], reduce="norm"),
                Capture([-1], positions="last_prompt"),
            ]
        },
    ),
    "ends": Case(
        PARIS, {"capture": [Logits(4, **LAST), Capture(sites="final_norm", positions="generated")]}
    ),
    "lenses": Case(
        PARIS,
        {
            "capture": [
                Lens([3, -1], top=4, tokens=[" Paris"], **LAST),
                Lens(3, top=4, kind="mapped"),
                Norms([3, -1], **LAST),
            ]
        },
    ),
    "features": Case(
        PARIS,
        {
            "capture": [Features("random", 9, features=[3, 1], **LAST), Capture(10)],
            "edits": [
                Feature(sae="jumps", index={3: 20.0, 17: 0.0, 30: 5.0}),
                Steer(token=7042, layer=TOP, scale=30),
            ],
        },
    ),
    "reconstructed": Case(
        PARIS, {"capture": Capture(10), "edits": Reconstruct("random", {3: 20.0}, error=True)}
    ),
    "attention": Case(
        PARIS,
        {
            "capture": [
                Attention([10], heads=[0, 3], queries=LAST["positions"], reduce="full"),
                Attention([10, -1], reduce=TopKeys(2), name="top"),
                Attention(10, heads=0, queries="generated", reduce=Mass(slice(0, 3)), name="mass"),
            ],
            "probes": Probe(attention=Mass(slice(0, 3)), layer=10, head=0, name="read"),
        },
    ),
    "families": Case(
        PARIS,
        {
            "probes": [
                Probe(
                    classes=Classes([VECTOR, -VECTOR], names=["no", "yes"]),
                    layer=5,
                    name="c",
                    link="softmax",
                    pool="mean:3",
                    act=Flag(above=0.1, output="yes"),
                ),
                Probe(
                    attention_pool=AttentionPool(query=VECTOR / 100, value=VECTOR),
                    layer=7,
                    name="a",
                    bias=0.5,
                ),
                Probe(
                    attention_pool=AttentionPool(value=[VECTOR, -VECTOR], kind="max"),
                    layer=7,
                    name="m",
                    phase="generated",
                ),
            ]
        },
    ),
    "stopped": Case(
        PARIS, {"probes": Probe(VECTOR, 10, name="p", phase="generated", act=Stop(above=-1e6))}
    ),
    "chat": Case(
        HELLO, {"capture": Capture([TOP]), "probes": Probe(VECTOR, 9, name="p", phase="prompt")}
    ),
    # The answer is "negunsqueeze veto Westugpy": the marks are its "unsqueeze" and its "ug".
    "between": Case(
        HELLO,
        {
            "capture": Capture([TOP], positions=Between("<|im_start|>", "<|im_end|>")),
            "probes": Probe(VECTOR, 9, name="p", positions=Between([35259], [1433])),
            "edits": Steer(VECTOR, 3, 1e-3, positions=Between([35259], [1433])),
        },
    ),
}


def fewer_layers(model: Path, folder: Path) -> Path:
    """A new folder with the first and the last layers of SmolLM2, whose own folder is `model`: what
    they generate is no language, but differs from prompt to prompt.
    """
    short = folder / "short"
    short.mkdir()
    config = json.loads((model / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (short / name).symlink_to(model / name)
    tensors = load_file(model / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if ".layers." not in name}
    for layer, whole in enumerate([*range(8), *range(26, 30)]):
        start = f"model.layers.{whole}."
        kept |= {
            name.replace(start, f"model.layers.{layer}."): values
            for name, values in tensors.items()
            if name.startswith(start)
        }
    save_file(kept, short / "model.safetensors")
    return short


def settings(folder: Path) -> dict[str, Any]:
    """midstream's settings of the engine and of the server; writes the files that they name."""
    saes = {}
    for name, kind, width in (("random", "topk", 400), ("jumps", "jumprelu", 40)):
        RandomSae(kind, WIDTH, width, "blocks.10.hook_resid_post").write(folder / name)
        saes[name] = str(folder / name)
    lens = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)) / 24
    save_file({"3": lens}, folder / "mapped.safetensors")
    return {
        "sites": ["resid_post", "rot_q", "final_norm"],
        "gate_states": 2,
        "doses": 64,
        "lenses": {"mapped": str(folder / "mapped.safetensors")},
        "saes": saes,
        "reconstruct": {"resid_post:10": 400},
        "readout_bytes": 8 << 20,
        "controllers": controlling.DECLARED,
    }


# A sweep, as arguments of `sweep`.
SWEEP: dict[str, Any] = {
    "prompt": "The capital of Japan is",
    "source": "The capital of France is",
    "metric": LogitDiff(" Paris", " Tokyo"),
    "layers": [3, 8, TOP],
    "sites": "resid_post",
    "positions": "prompt",
}

# A fit, as arguments of `fit`.
FIT: dict[str, Any] = {
    "positive": ["What a lovely day.", "I feel wonderful."],
    "negative": ["What an awful day.", "I feel terrible."],
    "layers": [3, 8],
    "folds": 2,
}


def ask(client: Client, case: Case, **more: Any) -> ServedOutput:
    """What a server answers to a case."""
    given = {**ASKED, **case.asked, **more}
    if case.is_chat:
        return client.chat(case.prompt, **given)
    return client.complete(case.prompt, **given)


def plain(completion: Any) -> dict[str, Any]:
    """What came of a completion, be it offline or served, as values that can be compared."""
    names = ("activations", "probes", "receipt")
    rows, probes, receipt = (getattr(completion, name, None) for name in names)
    readouts = {name: getattr(completion, name, None) for name in RESULTS}
    told = None if receipt is None else receipt.to_dict()
    if told is not None:
        del told["request_id"]
    return {
        "text": completion.text,
        "receipt": told,
        "rows": None
        if rows is None
        else {
            tap: (rows.encoded(*tap), rows.positions_of(*tap), rows.token_ids_of(*tap))
            for tap in rows
        },
        "codec": None if rows is None else rows.codec.spec,
        "probes": None
        if probes is None
        else {
            name: (probes[name], probes.positions_of(name), probes.token_ids_of(name))
            for name in probes
        },
        "readouts": {
            name: found.to_json() for name, found in readouts.items() if found is not None
        },
    }


def assert_equal(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> None:
    """Check texts, receipts, rows and scores: bit by bit, or each tensor to a part of its norm."""
    for name in ("text", "codec", "readouts"):
        assert mine[name] == theirs[name], name
    assert same_receipt(mine["receipt"], theirs["receipt"], max(tolerance, 1e-5))
    for name in ("rows", "probes"):
        assert (mine[name] is None) == (theirs[name] is None), name
        if theirs[name] is not None:
            assert list(mine[name]) == list(theirs[name])
            for key, values in theirs[name].items():
                for ours, other in zip(mine[name][key], values, strict=True):
                    assert ours.dtype == other.dtype
                    assert ours.shape == other.shape
                    # Rows are bytes, of float32 where no codec changed them.
                    mine_, theirs_ = (each.view(torch.float32) for each in (ours, other))
                    off = (mine_ - theirs_).norm() / theirs_.norm()
                    assert torch.equal(ours, other) or off <= tolerance, (name, key, off)


def main(model: str, out: str) -> None:
    from midstream import LLM, Directions, SamplingParams

    llm = LLM(model, **ENGINE, midstream=settings(Path(out).parent))
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    found = {}
    for name, case in CASES.items():
        ask = llm.chat if case.is_chat else llm.generate
        # A list of captures is one entry, that of the only prompt.
        asked = {key: [one] if isinstance(one, list) else one for key, one in case.asked.items()}
        [output] = ask(case.prompt, params, use_tqdm=False, **asked)
        found[name] = plain(output.outputs[0])
    found["fit"] = torch.tensor(Directions.fit(llm, **FIT).vectors)
    found["sweep"] = llm.sweep(**SWEEP, use_tqdm=False).to_json()
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
