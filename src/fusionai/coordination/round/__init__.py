"""What the rounds of training and serving jobs share: liveness, verification, reputation."""
