"""A run directory, or several, as one HTML page that needs no network."""

from ithaka.report.page import write_report

__all__ = ["write_report"]
