"""Identities of machines: keys, certificates, signed statements, and which members the owner trusts."""
