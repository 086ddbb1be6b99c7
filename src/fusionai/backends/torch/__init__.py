"""The PyTorch backend: CPU, CUDA and MPS. Importing this package imports no framework; its modules do.

Deterministic: the same call gives the same bits. Neighbours: `backends.interface` is the interface it implements,
`backends.registry` opens it, `execution` calls it.
"""
