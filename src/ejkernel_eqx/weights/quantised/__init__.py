"""Published weights of 8 and 4 bits. Each form is repacked into a `QuantizedWeight`, which is exact."""
