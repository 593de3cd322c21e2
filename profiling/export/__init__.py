"""The history for other programs: CSV of rows, JSON of records."""

from __future__ import annotations

from .records import json_of
from .table import csv_of

__all__ = ["csv_of", "json_of"]
