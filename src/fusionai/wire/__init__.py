"""What crosses a network, as data: messages (schemas), frames (bytes), and the assembly of one from the other.

Decides what is well formed and how large it may be, before anything is allocated. Never opens a socket, never waits,
never reads a clock. Neighbours: `transport` moves frames; `coordination` takes messages as events.
"""
