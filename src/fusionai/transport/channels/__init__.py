"""Established connections: frames, backpressure, sharing of the uplink, and detection of a dead path."""
