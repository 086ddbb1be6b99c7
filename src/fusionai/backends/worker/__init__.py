"""Runs a backend in a process of its own, without keys, network or files other than the libraries it computes with."""
