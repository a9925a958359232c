"""Decides which tiles of scores a mask function leaves visible, exactly, without a number for every pair. `README.md` has the mathematics."""
