"""The Triton kernel of attention scores against PyTorch."""

from __future__ import annotations

import torch
from support.attention_scores import cases

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_the_kernel_computes_what_pytorch_does() -> None:
    checked = [case.check(name) for name, case in cases("cuda", DTYPES)]
    assert len(checked) == 66
