"""Rows of a store in other tools' files: NumPy's npz, Parquet, Arrow."""

from midstream.export.arrow import export_arrow, export_parquet, record_batches
from midstream.export.npz import export_npz

__all__ = ["export_arrow", "export_npz", "export_parquet", "record_batches"]
