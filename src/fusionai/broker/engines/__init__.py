"""Journals in a database server that an operator already runs, instead of files on the broker's disk."""
