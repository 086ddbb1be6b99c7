"""The ONNX Runtime backend: forward passes only. Sub-graphs become ONNX models; nothing here trains."""
