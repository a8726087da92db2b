"""LoRA adapters over two tensor-parallel ranks: rows, and logits of an adapted head."""

from support import adapters
from support.alongside import check_rows, hooked, push, rows_of
from support.engines import GPU_MEMORY, generated, greedy, tokens
from support.oracle import Oracle, relative_error
from support.ranks import ranks

from midstream import Capture, Logits

PLACES = ("model.layers", "post_attention_layernorm")
SITES = ["resid_pre", "resid_mid", "resid_post"]


def test_logits_of_each_request_are_those_of_its_adapters_head(tiny_llama, tiny_models):
    """Each rank has a part of the head and of its adapter; prompts come in chunks."""
    from vllm.lora.request import LoRARequest

    whose: list[tuple[LoRARequest | None, Oracle]] = [(None, Oracle(tiny_llama, *PLACES))]
    for nth in (1, 2):
        folder = adapters.make(tiny_llama, tiny_models / f"ranks{nth}", nth, head=nth == 2)
        merged = adapters.merge(tiny_llama, folder, tiny_models / f"ranks_merged{nth}")
        request = LoRARequest(f"adapter{nth}", nth, str(folder))
        whose.append((request, Oracle(merged, *PLACES)))
    order = [2, 0, 1, 2, 0, 2]
    prompts = [list(range(3 + nth, 20 + 9 * nth)) for nth in range(len(order))]
    rows = Capture("all", SITES)
    asked = [
        Logits(6), Logits(tokens=[9, 150]), Logits(tokens="all"), [Logits(tokens="all"), rows],
        rows, None,
    ]  # fmt: skip
    settings = {
        "tensor_parallel_size": 2,
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 6,
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 8,
        "midstream": {"sites": [*SITES, "final_norm"], "check_ranks": True},
        **GPU_MEMORY,
    }
    with ranks(tiny_llama, **settings) as llm:
        outputs = llm.generate(
            [tokens(prompt) for prompt in prompts],
            greedy(5, detokenize=False),
            lora_request=[whose[nth][0] for nth in order],
            capture=asked,
            steer=[[push()] if nth == 3 else None for nth in range(len(order))],
            use_tqdm=False,
        )
    for nth, output in enumerate(outputs):
        model, edits = whose[order[nth]][1], [hooked()] if nth == 3 else []
        ids = rows_of(prompts[nth], generated(output))
        logits, _ = model.run(ids, edits)
        assert generated(output) == logits[len(prompts[nth]) - 1 :].argmax(-1).tolist()
        if nth in (3, 4):
            check_rows(model, output, ids, edits)
        if nth < 4:
            found = output.logits
            assert found.positions.tolist() == list(range(len(ids)))
            assert relative_error(found.values, logits.gather(1, found.ids)) < 1e-4
            assert relative_error(found.logsumexp, logits.logsumexp(-1)) < 1e-4
        if nth < 5:
            assert output.receipt.status == "ok"
