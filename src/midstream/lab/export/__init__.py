"""Export of stored rows to files of other tools: NumPy npz, Parquet, Arrow."""

from midstream.lab.export.arrow import export_arrow, export_parquet
from midstream.lab.export.npz import export_npz

__all__ = ["export_arrow", "export_npz", "export_parquet"]
