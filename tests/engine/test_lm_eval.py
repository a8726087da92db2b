"""lm-eval's model `vllm`, unchanged, is steered by the environment, as its own steered one is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import lm_eval_task
from support import engines, tiny

import midstream

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

_DRAW = torch.Generator().manual_seed(8)
VECTORS = {layer: torch.randn(tiny.HIDDEN, generator=_DRAW) * 2 for layer in (0, 1)}
SCALE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("lm-eval")
    lm_eval_task.write(found)
    return found


@pytest.fixture(scope="module")
def steered(folder: Path) -> tuple[str, str]:
    return lm_eval_task.write_vectors(folder, VECTORS, SCALE)


@pytest.fixture(scope="module")
def mine(talking_llama: Path, steered: tuple[str, str], folder: Path) -> Iterator[Any]:
    """lm-eval's model `vllm` in a process that begins with MIDSTREAM set."""
    midstream.activate()  # as vLLM's plugins do there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDSTREAM", steered[0])
        patch.syspath_prepend(str(lm_eval_task.name_vllm(folder)))
        from lm_eval.models import vllm_causallms

        with engines.closing() as made:
            lm = vllm_causallms.VLLM(
                pretrained=str(talking_llama),
                dtype="float32",
                max_model_len=256,
                enforce_eager=True,
                num_gpu_blocks_override=512,
                **engines.GPU_MEMORY,
            )
            made.append(lm.model)
            yield lm


def scores(lm: Any, folder: Path) -> tuple[Any, Any]:
    """The results of the task, and each choice's log-probability."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        lm, tasks=["tiny"], task_manager=TaskManager(include_path=str(folder)), bootstrap_iters=0
    )
    assert found is not None
    each = [
        [answer[0] for answer in sample["filtered_resps"]] for sample in found["samples"]["tiny"]
    ]
    assert len(each) == len(lm_eval_task.QUESTIONS)
    return found["results"]["tiny"], [float(one) for sample in each for one in sample]


@pytest.mark.nightly
def test_the_score_is_that_of_lm_evals_own_steered_model(mine, talking_llama, steered, folder):
    from lm_eval.models.hf_steered import SteeredModel
    from lm_eval.models.huggingface import HFLM

    theirs = SteeredModel(str(talking_llama), steered[1], device="cpu", dtype="float32")
    plain = HFLM(str(talking_llama), device="cpu", dtype="float32")
    results, found = scores(mine, folder)
    expected_results, expected = scores(theirs, folder)
    _, unsteered = scores(plain, folder)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-4, rtol=1e-4)
    assert results["acc,none"] == expected_results["acc,none"]
    assert (torch.tensor(found) - torch.tensor(unsteered)).abs().max() > 0.1
