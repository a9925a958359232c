"""Published weights of 8 and 4 bits: each form is repacked into the values of this package, which is exact."""
