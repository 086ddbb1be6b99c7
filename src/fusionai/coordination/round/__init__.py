"""What the machines of both jobs share: state, roles, events, commands, faults, liveness, verification."""
