"""The compiler's passes over an ONNX graph, which pipeline.py lists in order. Passes share graph.py and weights.py."""
