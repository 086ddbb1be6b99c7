"""The state machine of a serving job, and its decisions about sessions, passes and cache pages."""
