"""Train a small sparse autoencoder, find a feature that means something, and clamp it.

The model writes on a few topics, and its vectors after one layer are captured. An SAE with tied
weights is trained on them (Cunningham et al. 2023, arXiv:2309.08600), saved in the format of
SAELens, and loaded like any other SAE. The feature that is most active on one topic is then clamped
to a value while the model writes about something else (Templeton et al. 2024, "Scaling
Monosemanticity").

    python examples/sae_feature.py [--model FOLDER]

With about 1,400 vectors this is a toy: most of its features mean little.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import log_probs, model_from, show, start
from safetensors.torch import save_file

from midstream import LLM, SAE, Capture, Feature, SamplingParams

LAYER = 14
FEATURES = 384
TOPICS = {
    "cooking": [
        "Heat the butter in a pan, add the onions and",
        "For the soup, boil the potatoes with garlic and",
        "The cake needs flour, sugar, eggs and",
        "Season the chicken with salt, pepper and",
        "Stir the sauce until it is thick, then",
    ],
    "the sea": [
        "The ship sailed out of the harbour into",
        "Waves broke over the deck as the captain",
        "Whales and dolphins swim in the ocean where",
        "The fishermen pulled their nets from the sea and",
        "The lighthouse warned the boats of the rocks and",
    ],
    "money": [
        "The bank raised its interest rates, so investors",
        "Shareholders were pleased that the company's profits",
        "She put her savings in bonds and stocks because",
        "The price of gold fell while the dollar",
        "To pay off the loan, the firm had to",
    ],
    "music": [
        "The orchestra tuned its violins before the concert and",
        "The pianist played a sonata by Beethoven with",
        "Her new song has a slow melody and",
        "The guitarist and the drummer began to play",
        "The choir sang the chorus while the organ",
    ],
    "medicine": [
        "The doctor examined the patient and found that",
        "The nurse gave the vaccine to the children, so",
        "The symptoms of the disease are fever and",
        "The surgeon operated on the heart while",
        "Antibiotics kill the bacteria that cause",
    ],
}
TOPIC = "cooking"
OPENINGS = [
    "Yesterday I went to",
    "My sister told me about",
    "The story begins with",
    "We all like",
]
COOKING = [" garlic", " butter", " onions", " chicken"]
MUSIC = [" guitar", " piano", " songs", " violin"]  # for comparison
VALUES = [0.0, 0.5, 1.0]  # shares of the feature's largest activation


def write_and_capture(llm: LLM) -> list[Any]:
    """Return one output per opening, topic by topic, with the rows of `resid_post` at LAYER."""
    openings = [opening for topic in TOPICS.values() for opening in topic]
    # The first token's vector is many times longer than any other, and equal in every text.
    return llm.generate(
        openings,
        SamplingParams(temperature=0.7, seed=0, max_tokens=48, ignore_eos=True),
        capture=Capture(LAYER, positions="all", exclude=0),
        use_tqdm=False,
    )


def train(rows: torch.Tensor, steps: int = 600, sparsity: float = 0.1) -> dict[str, torch.Tensor]:
    """Train an SAE on rows [n, width]: a = relu((x − b_dec) W_enc + b_enc), x̂ = a W_dec + b_dec.

    The weights are tied: W_enc is W_dec transposed, and its directions have length 1.

    Returns:
        The tensors, by SAELens's names.
    """
    draw = torch.Generator().manual_seed(0)
    b_dec = rows.mean(0)
    size = (rows - b_dec).norm(dim=1).mean()
    x = (rows - b_dec) / size
    weights = x[torch.randperm(len(x), generator=draw)[:FEATURES]].clone().requires_grad_()
    bias = torch.full((FEATURES,), -0.1, requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=2e-3)
    for _ in range(steps):
        batch = x[torch.randint(len(x), (256,), generator=draw)]
        unit = torch.nn.functional.normalize(weights, dim=1)
        acts = torch.relu(batch @ unit.T + bias)
        error = (acts @ unit - batch).square().sum(1).mean()
        loss = error + sparsity * acts.sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    unit = torch.nn.functional.normalize(weights, dim=1).detach()
    # Activations in the stream's units: only the bias and b_dec depend on the scale.
    return {
        "W_enc": unit.T.contiguous(),
        "b_enc": bias.detach() * size,
        "W_dec": unit,
        "b_dec": b_dec,
    }


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write the two files of SAELens's format."""
    save_file(tensors, folder / "sae_weights.safetensors")
    width, features = tensors["W_enc"].shape
    config = {
        "architecture": "standard",
        "d_in": width,
        "d_sae": features,
        "hook_name": f"blocks.{LAYER}.hook_resid_post",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
    }
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def find(sae: SAE, rows: Sequence[torch.Tensor]) -> int:
    """Return the feature that is most active on TOPIC's texts and least on all others.

    Args:
        rows: per text, topic by topic, float32 [tokens, width].
    """
    means = torch.stack([sae.encode(each).mean(0) for each in rows])
    ours = torch.tensor([topic == TOPIC for topic, texts in TOPICS.items() for _ in texts])
    return int((means[ours].mean(0) - 2 * means[~ours].mean(0)).argmax())


def top_words(llm: LLM, acts: torch.Tensor, token_ids: torch.Tensor) -> str:
    """Return the distinct tokens at which a feature is most active, with their activations."""
    words: dict[str, float] = {}
    for index in acts.argsort(descending=True)[:40].tolist():
        words.setdefault(llm.get_tokenizer().decode([int(token_ids[index])]), float(acts[index]))
    return ", ".join(f"{word.strip()} {act:.0f}" for word, act in list(words.items())[:10])


def preference(llm: LLM, edit: Feature) -> float:
    """Return log p(next word in COOKING) − log p(next word in MUSIC), mean over the openings."""
    found = log_probs(llm, OPENINGS, COOKING + MUSIC, edits=edit)
    ours, theirs = (torch.stack([found[word] for word in words]) for words in (COOKING, MUSIC))
    return float((ours.logsumexp(0) - theirs.logsumexp(0)).mean())


def off_by(llm: LLM, sae: SAE, index: int, value: float) -> float:
    """Return the largest error of the clamped feature, on the openings of TOPIC.

    The edit adds (value − activation) · decoder to the stream. The encoder's row equals the
    decoder's, so the encoder reads exactly the value where the feature was active before. Elsewhere
    its input to the ReLU was below 0, and it now reads that much less than the value.
    """

    def prompt_rows(edits: Feature | None) -> torch.Tensor:
        outputs = llm.generate(
            TOPICS[TOPIC],
            SamplingParams(max_tokens=1),
            capture=Capture(LAYER, positions="prompt", exclude=0),
            edits=edits,
            use_tqdm=False,
        )
        return torch.cat([output.activations["resid_post", LAYER].float() for output in outputs])

    before, after = prompt_rows(None), prompt_rows(clamp(sae, index, value))
    was = sae.encode(before)[:, index]
    put_in = was + (after - before) @ sae.w_dec[index]
    read = sae.encode(after)[was > 0, index]
    return float((torch.cat([put_in, read]) - value).abs().max())


def clamp(sae: SAE, index: int, value: float) -> Feature:
    """Return the edit that sets one feature to a value at every token but the first."""
    return sae.feature(index, mode="set", value=value, exclude=0)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the example.

    Returns:
        `variance`: the share of the rows' variance that the SAE explains; `words`: the tokens at
        which the feature is most active; `values`: the clamped values; `off_by`: for each value,
        the largest error in captured rows; `preferences`: for each, the log-odds of a cooking word.
    """
    llm = start(model_from(arguments, __doc__))

    outputs = write_and_capture(llm)
    rows = [output.activations["resid_post", LAYER].float() for output in outputs]
    every = torch.cat(rows)
    with tempfile.TemporaryDirectory() as folder:
        sae = SAE.load(save(Path(folder), train(every)))

    acts = sae.encode(every)
    left = (sae.decode(acts) - every).square().sum() / (every - every.mean(0)).square().sum()
    index = find(sae, rows)
    words = top_words(
        llm, acts[:, index], torch.cat([output.activations.token_ids for output in outputs])
    )
    active = float((acts > 0).float().sum(1).mean())
    show(
        f"{FEATURES} features of {len(every)} rows at layer {LAYER}",
        ["variance explained", "active per token", "feature", "most active at"],
        [(1 - float(left), active, index, words)],
    )

    found: dict[str, Any] = {"variance": 1 - float(left), "words": words}
    found |= {"values": [], "off_by": [], "preferences": []}
    table = []
    for share in VALUES:
        value = share * float(acts[:, index].max())
        edit = clamp(sae, index, value)
        params = SamplingParams(temperature=0, max_tokens=14)
        outputs = llm.generate(OPENINGS, params, edits=edit, use_tqdm=False)
        for opening, output in zip(OPENINGS, outputs, strict=True):
            table.append((f"{value:.0f}", opening + output.outputs[0].text))
        found["values"].append(value)
        found["off_by"].append(off_by(llm, sae, index, value))
        found["preferences"].append(preference(llm, edit))
    show(f"Feature {index}, clamped", ["value", "text"], table)
    far = (f"{distance:.0e}" for distance in found["off_by"])
    numbers = list(zip(found["values"], far, found["preferences"], strict=True))
    show("In numbers", ["value", "off by", "log-odds of cooking over music"], numbers)
    return found


if __name__ == "__main__":
    main()
