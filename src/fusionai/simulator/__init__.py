"""What a plan does in time: the shipped rules run on an agenda instead of a clock. Decides nothing a job would decide.

`step` and `generation` simulate single steps and tokens event by event; `course` simulates hours of a job under churn.
The same inputs and the same seed give the same run.

Neighbours: `scheduling` plans and prices, `coordination` decides, `cli.simulate` reads scenarios and shows runs.
"""
