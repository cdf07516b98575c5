"""The executor on NVIDIA GPUs, with the driver's API, the upload of weights, and sampling."""
