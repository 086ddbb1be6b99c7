"""The driver of a serving job: the I/O around the state machine `coordination.serving.driver`, plus sampling and text.

The state machine makes the decisions. Neighbours: `client` starts the driver, `execution` runs the stages that it
drives, `gateway` offers it over HTTP.
"""
