"""Files of SpecForge's offline training: one for each completion."""

from __future__ import annotations

from pathlib import Path

import torch

from midstream.errors import StoreError
from midstream.lab.export.rows import AlignedRows, check_one_width

_GROUP = 2000  # files per folder


def write(rows: AlignedRows, folder: Path) -> int:
    """Write `rows_0-2000/data_0.ckpt` and so on, as SpecForge's EAGLE-3 reads; return the tokens.

    A file has `input_ids` and `loss_mask`, int64 [tokens]; `aux_hidden_state` [1, tokens, taps ·
    width], all taps but the last; and `hidden_state` [1, tokens, width], the last. The trainer
    multiplies the last tap by the head of the model.
    """
    if rows.taps[-1][0] != "final_norm" or len(rows.taps) < 2:
        raise StoreError(
            "join: SpecForge multiplies the last tap by the head, so it must be final_norm, after "
            f"those that the draft model reads, got {', '.join(rows.names)}"
        )
    check_one_width(rows, "specforge")
    tokens = 0
    for number, sequence in enumerate(rows.sequences()):
        first = number // _GROUP * _GROUP
        group = folder / f"rows_{first}-{first + _GROUP}"
        if number == first:
            group.mkdir(parents=True)
        record = {
            "input_ids": sequence.token_ids,
            "loss_mask": sequence.loss_mask.to(torch.int64),
            "aux_hidden_state": torch.cat(sequence.values[:-1], -1)[None],
            # A copy: a view would be saved with all that it is a view of.
            "hidden_state": sequence.values[-1].clone()[None],
        }
        torch.save(record, group / f"data_{number}.ckpt")
        tokens += len(sequence)
    return tokens
