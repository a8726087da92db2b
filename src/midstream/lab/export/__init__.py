"""Export of stored rows in the forms of other tools."""

from midstream.lab.export.arrow import export_arrow, export_parquet
from midstream.lab.export.forms import Exported, export
from midstream.lab.export.npz import export_npz
from midstream.lab.export.saelens import saelens_batches

__all__ = ["Exported", "export", "export_arrow", "export_npz", "export_parquet", "saelens_batches"]
