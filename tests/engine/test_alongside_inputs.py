"""LoRA adapters and prompts of embeddings, against merged weights in transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from support import adapters
from support.alongside import EVERYTHING, check_captured, check_rows, hooked, push, rows_of
from support.engine_view import inspect
from support.engines import engine, generated, greedy, tokens
from support.oracle import HookEdit, Oracle, relative_error
from support.tiny import HIDDEN
from torch import Tensor

from midstream import Logits, Probe, Steer, TokenIds
from midstream.errors import SpecError

PLACES = ("model.layers", "post_attention_layernorm")


@pytest.fixture(scope="module")
def adapted(tiny_llama: Path, tiny_models: Path) -> list[tuple[Any, Oracle]]:
    """Two adapters, the second of the head too: vLLM's request for each, and the reference of the
    merged model.
    """
    from vllm.lora.request import LoRARequest

    found = []
    for nth in (1, 2):
        folder = adapters.make(tiny_llama, tiny_models / f"adapter{nth}", nth, head=nth == 2)
        merged = adapters.merge(tiny_llama, folder, tiny_models / f"merged{nth}")
        found.append((LoRARequest(f"adapter{nth}", nth, str(folder)), Oracle(merged, *PLACES)))
    return found


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    """Steps of 32 tokens: longer prompts come in chunks.

    One slot for adapters more than there are: where all are taken, vLLM on the CPU applies the last
    one's adapter to requests without any.
    """
    with engine(
        tiny_llama,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        block_size=32,
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        enable_prompt_embeds=True,
        midstream={"sites": ["resid_pre", "resid_mid", "resid_post", "final_norm"]},
    ) as found:
        yield found


def prompt(nth: int) -> list[int]:
    return list(range(3 + nth, 20 + 9 * nth))


def test_adapted_and_plain_requests_of_one_batch_are_each_right(llm, reference, adapted):
    whose = [None, adapted[0], adapted[1]] * 4
    steered = [nth % 2 == 0 for nth in range(12)]
    outputs = ask_all(
        llm,
        [prompt(nth) for nth in range(12)],
        6,
        lora_request=[each and each[0] for each in whose],
        capture=EVERYTHING,
        steer=[[push()] if each else None for each in steered],
    )
    for nth, output in enumerate(outputs):
        model = reference if whose[nth] is None else whose[nth][1]
        edits = [hooked()] if steered[nth] else []
        rows = rows_of(prompt(nth), generated(output))
        logits = check_rows(model, output, rows, edits)
        assert generated(output) == logits[len(prompt(nth)) - 1 :].argmax(-1).tolist()


def test_logits_of_each_request_are_those_of_its_adapters_head(llm, reference, adapted):
    """Of all positions, while vLLM's own metadata are of the sampled rows of a step."""
    whose = [adapted[1], None, adapted[0], adapted[1], None]
    asked = [Logits(6), Logits(tokens=[9, 3]), Logits(tokens="all"), Logits(tokens="all"), None]
    outputs = ask_all(
        llm,
        [prompt(nth) for nth in range(5)],
        greedy(5, detokenize=False, logprobs=1),
        lora_request=[each and each[0] for each in whose],
        capture=asked,
        steer=[[push()] if nth == 3 else None for nth in range(5)],
    )
    for nth, output in enumerate(outputs):
        model = reference if whose[nth] is None else whose[nth][1]
        rows = rows_of(prompt(nth), generated(output))
        logits, _ = model.run(rows, [hooked()] if nth == 3 else [])
        assert generated(output) == logits[len(prompt(nth)) - 1 :].argmax(-1).tolist()
        if asked[nth] is not None:
            found = output.logits
            assert output.receipt.status == "ok"
            assert found.positions.tolist() == list(range(len(rows)))
            expected = logits.gather(1, found.ids)
            assert relative_error(found.values, expected) < 1e-4
            assert relative_error(found.logsumexp, logits.logsumexp(-1)) < 1e-4


def embeddings(length: int, seed: int) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run_on_embeddings(
    reference: Oracle, given: Tensor, generated_ids: list[int], edits: list[HookEdit]
) -> tuple[Tensor, dict[Any, Tensor]]:
    """As `Oracle.run`, for a prompt of embeddings and the tokens generated after it."""
    table = reference.model.get_input_embeddings()
    later = table(torch.tensor(generated_ids, dtype=torch.int64))
    whole = torch.cat((given, later))

    def fed(_module: Any, _args: Any, _out: Any) -> Tensor:
        return whole[None].clone()

    handle = table.register_forward_hook(fed)
    try:
        return reference.run([0] * len(whole), edits)
    finally:
        handle.remove()


@pytest.mark.parametrize("length", [1, 20, 75])
def test_prompts_of_embeddings_are_read_and_edited_as_given(llm, reference, length):
    given = [embeddings(length, seed) for seed in range(4)]
    mixed: list[Any] = []
    for nth, each in enumerate(given):
        mixed += [{"prompt_embeds": each}, tokens(prompt(nth))]
    outputs = llm.generate(
        mixed,
        greedy(6, detokenize=False),
        capture=EVERYTHING,
        steer=[[push()] if nth % 4 > 1 else None for nth in range(8)],
        use_tqdm=False,
    )
    for nth, output in enumerate(outputs):
        edits = [hooked()] if nth % 4 > 1 else []
        if nth % 2:
            check_rows(reference, output, rows_of(prompt(nth // 2), generated(output)), edits)
            continue
        fed = given[nth // 2]
        later = generated(output)[:-1]
        logits, seen = run_on_embeddings(reference, fed, later, edits)
        check_captured(output, seen, range(length + 5))
        assert torch.equal(output.activations["resid_pre", 0][:length], fed)
        assert generated(output) == logits[length - 1 :].argmax(-1).tolist()
        assert output.receipt.status == "ok"
        assert output.activations.token_ids.tolist() == [0] * length + later
    inspect(llm).check_integrity()


def test_edits_of_generated_ids_work_after_a_prompt_of_embeddings(llm, reference):
    given = embeddings(9, 7)
    plain = llm.generate({"prompt_embeds": given}, greedy(10, detokenize=False), use_tqdm=False)[0]
    token = generated(plain)[1]
    edit = push(positions=TokenIds(token), phase="generated")
    output = llm.generate(
        {"prompt_embeds": given},
        greedy(10, detokenize=False),
        capture=EVERYTHING,
        probes=Probe(torch.ones(HIDDEN), 2, name="sum"),
        steer=[edit],
        use_tqdm=False,
    )[0]
    later = generated(output)[:-1]
    hit = {9 + nth for nth, each in enumerate(later) if each == token}
    logits, seen = run_on_embeddings(reference, given, later, [hooked(where=hit.__contains__)])
    check_captured(output, seen, range(18))
    assert output.receipt.edited.applied == len(hit) > 0
    assert generated(output) == logits[8:].argmax(-1).tolist()
    expected = seen["resid_post", 2].sum(-1)
    torch.testing.assert_close(output.probes["sum"], expected, rtol=1e-4, atol=1e-3)


def test_where_some_of_a_prompt_is_embeddings_its_ids_are_not_searched(llm, reference):
    """vLLM puts placeholders at embeddings, which would be found as if they were tokens."""
    given, known = embeddings(30, 3), prompt(0)
    ids, is_token = [7] * 30, [False] * 30
    for nth, token in enumerate(known[:10]):
        ids[5 + nth], is_token[5 + nth] = token, True
    mixed = {"prompt_embeds": given, "prompt_token_ids": ids, "prompt_is_token_ids": is_token}
    asked = {"capture": EVERYTHING, "steer": [push()]}
    output = llm.generate(mixed, greedy(4, detokenize=False), **asked, use_tqdm=False)[0]
    table = reference.model.get_input_embeddings().weight
    fed = given.clone()
    fed[5:15] = table[torch.tensor(known[:10])].detach()
    later = generated(output)[:-1]
    logits, seen = run_on_embeddings(reference, fed, later, [hooked()])
    check_captured(output, seen, range(33))
    assert generated(output) == logits[29:].argmax(-1).tolist()
    with pytest.raises(SpecError, match="this prompt has no token ids"):
        llm.generate(
            mixed,
            greedy(2, detokenize=False),
            steer=[Steer(torch.ones(HIDDEN), 1, positions=TokenIds(7))],
            use_tqdm=False,
        )
