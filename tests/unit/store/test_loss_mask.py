"""Loss masks of stored rows: by the roles that a capture stored with its prompts."""

import pytest
import torch
from unit.store.making import TAPS, entry, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import RowDataset, SequenceDataset

# Prompts of 10 tokens and 4 generated: the assistant's tokens are 2, 3, 7, 8, 9 and the generated.
ROLES = {"user": [[0, 2], [4, 7]], "assistant": [[2, 4], [7, 10]]}
OF_ASSISTANT = {2, 3, *range(7, 14)}


def store(root, *, shard_bytes=10**6, roles=(None, ROLES, None, {"user": [[0, 10]]})):
    """Completions of 14 tokens: of each of these roles, and one whose own metadata has the name."""
    entries = [
        entry(f"r{number}", rows=14, seed=number, prompt_tokens=10,
              metadata={} if known is None else {"line": number, "roles": known})
        for number, known in enumerate(roles)
    ]  # fmt: skip
    own = {"roles": ["admin"], "nested": {"roles": ROLES}}
    entries.append(entry("own", rows=14, prompt_tokens=10, metadata=own))
    write(root, entries, shard_bytes=shard_bytes)
    return open_store(root)


def wanted(request, position):
    if request == "r1":
        return position in OF_ASSISTANT
    return position >= 10 if request == "r3" else True


@pytest.mark.parametrize("shard_bytes", [1000, 10**6])
@pytest.mark.parametrize("join", [None, [TAPS[2], TAPS[0]]])
def test_rows_count_if_they_are_the_assistants_or_their_roles_are_not_known(
    tmp_path, shard_bytes, join
):
    stored = store(tmp_path, shard_bytes=shard_bytes)
    assert (len(stored.shards) > 2) == (shard_bytes == 1000)
    dataset = RowDataset(stored, 9, join=join)
    count = 0
    for batch in dataset:
        own = stored.select().take(batch["index"])
        assert batch["loss_mask"].dtype == torch.bool
        assert batch["loss_mask"].tolist() == [
            wanted(request, position)
            for request, position in zip(own.request, batch["position"].tolist(), strict=True)
        ]
        count += len(own)
    assert count == (3 if join is None else 1) * 5 * 14


def test_sequences_count_by_their_roles_unless_a_phase_is_asked_for(tmp_path):
    stored = store(tmp_path)
    for loss, of_first in ((None, OF_ASSISTANT), ("generated", set(range(10, 14)))):
        options = {"length": 16, "join": TAPS, "loss": loss, "shuffle": False, "exclude": "first"}
        (batch,) = SequenceDataset(stored, 5, **options)
        for row in range(5):
            request = stored.select().take(batch["index"][row][:1]).request[0]
            own = {at for at in range(16) if batch["loss_mask"][row][at]}
            by_role = {at for at in range(1, 14) if wanted(request, at)}
            assert own == (by_role if loss is None else of_first)


@pytest.mark.parametrize(
    "spans", [[[2, 1]], [[3, 5], [4, 6]], [[0, 11]], [[0.0, 2]], [[1]], "all", [[-1, 2]], [None]]
)
def test_malformed_roles_are_refused(tmp_path, spans):
    stored = store(tmp_path, roles=[{"assistant": spans}])
    with pytest.raises(StoreError, match=r"metadata.roles.assistant: expected ascending ranges"):
        list(RowDataset(stored, 8))
