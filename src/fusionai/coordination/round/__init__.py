"""What the machines of training and serving jobs share: roles, events, faults, liveness, verification, reputation."""
