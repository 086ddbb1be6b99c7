"""Simulates plans in virtual time with the shipped decision code: stage machines, takeover rules, broker decisions.

`step` and `generation` simulate single steps and tokens event by event; `course` simulates hours of a job under churn.
The same inputs and the same seed give the same run.

Neighbours: `scheduling` plans and prices, `coordination` decides, `cli.simulate` reads scenarios and shows runs.
"""
