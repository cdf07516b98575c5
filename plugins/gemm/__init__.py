"""Matrix products in each weight and activation format, and the quantization of their inputs."""
