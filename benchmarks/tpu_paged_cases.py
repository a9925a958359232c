"""The kernels of attention over pages for `tpu_static.py`, beside JAX's own: paged attention for decoding, ragged paged attention for prompts."""
