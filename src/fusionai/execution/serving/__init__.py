"""One machine's part in a serving job: stages, retained rows, weights, verification."""
