"""Tracing of a module into functional ATen operators, and the rewrites that make its operators fit the IR."""
