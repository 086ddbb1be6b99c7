"""Views of a job for people: live views on a terminal, and reports as self-contained HTML pages.

Reads figures and draws them, without network access. Never imports `broker`, `peer` or `coordination`. Neighbours:
`cli` and `client` pass in the figures; `training` produces them.
"""
