"""Simulates plans in virtual time with the shipped machines of driver, stages and broker, and the takeover rules.

`step` and `generation` simulate single steps and tokens event by event; `course` simulates hours of a job under churn
in the `world` of its processes: `driver`, `member`, `broker`.
The same inputs and the same seed give the same run.

Neighbours: `scheduling` plans and prices, `coordination` decides, `cli.planning.simulate` reads scenarios and shows
runs."""
