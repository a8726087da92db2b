"""On-disk store of captured rows, for any number of concurrent writers and lazy readers.

`docs/store-format.md` specifies the format. vLLM is not required.
"""

from midstream.store.dataset import RowDataset
from midstream.store.format.entry import Entry, Header, TapRows
from midstream.store.maintenance.merge import merge
from midstream.store.maintenance.prune import Pruned, find_prunable, prune
from midstream.store.maintenance.verify import Finding, Verification, verify
from midstream.store.selection import Batch, Selection
from midstream.store.sequence_dataset import SequenceDataset
from midstream.store.store import Store, StoredRequest, open_store
from midstream.store.writer import Writer

__all__ = [
    "Batch",
    "Entry",
    "Finding",
    "Header",
    "Pruned",
    "RowDataset",
    "Selection",
    "SequenceDataset",
    "Store",
    "StoredRequest",
    "TapRows",
    "Verification",
    "Writer",
    "find_prunable",
    "merge",
    "open_store",
    "prune",
    "verify",
]
