"""The ONNX Runtime backend, for forward passes only: sub-graphs become ONNX models, without gradients."""
