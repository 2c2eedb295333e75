"""What is told of a run: figures as a table, as JSON and as a page of documentation, and pictures, written to files."""

from .figure_rows import table_of
from .files import ReportError
from .runs import Run, read_run
from .writing import Reports

__all__ = ["ReportError", "Reports", "Run", "read_run", "table_of"]
