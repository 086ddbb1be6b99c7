"""The state machines of a training job: its driver and its stages."""
