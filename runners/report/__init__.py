"""The report: what the files of results hold, as one page."""
