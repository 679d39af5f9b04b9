"""Trained drafters in the formats that serving engines read: written, read back, compared, and only then there."""

from outrider.export.export import FORMATS, Report, export

__all__ = ["FORMATS", "Report", "export"]
