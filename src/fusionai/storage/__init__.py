"""What must survive: checkpoints, the commit journal, a job's directory. Whole or not at all, checked by hash."""
