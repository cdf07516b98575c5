"""Passes that fuse operations of a graph, so that fewer kernels read and write memory."""
