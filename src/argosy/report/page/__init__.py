"""The report: one self-contained HTML page about a plan, readable offline, in print and without colour."""

from argosy.report.page.page import Picture, report_page

__all__ = ["Picture", "report_page"]
