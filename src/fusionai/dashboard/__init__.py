"""What a person sees of a job: the live view on a terminal, and the report as one self-contained HTML page.

Reads figures and draws; decides nothing and asks no network. Never touches `broker`, `peer` or `coordination`.
Neighbours: `cli` and `client` give it figures; `telemetry` and `training` make them.
"""
