"""Write a report as one self-contained HTML page, readable offline, in print and without colour."""

from argosy.report.page.page import PageContent, Picture, ScenarioTimes, report_page
from argosy.report.page.report import Report

__all__ = ["PageContent", "Picture", "Report", "ScenarioTimes", "report_page"]
