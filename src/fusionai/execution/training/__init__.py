"""One machine's part in a training job: stages, boundary tensors, snapshots, verification."""
