"""Conversion of a trace into a graph of the IR: lowering, copies of repeated layers, differences in evaluation."""
