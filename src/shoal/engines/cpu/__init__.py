"""Decoding on a processor: the decoder over pages, the forward pass of dense models, and its kernels."""
