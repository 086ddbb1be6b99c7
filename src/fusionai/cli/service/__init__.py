"""`fusion service`: commands that run by themselves, started by the system at login."""
