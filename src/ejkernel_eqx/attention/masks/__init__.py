"""Masks: which query sees which key, and which tiles of scores kernels run.

- `mask`: `Mask`, what users build and combine; `sizes` checks its numbers, `picture` draws it, `specs` splits it over a mesh.
- `lower`: a mask as what kernels take. Its parts are `pattern` (all that is known while tracing, one function of head, query and key,
  from those of `functions`), `row_ranges` (a range of keys for each query), `block_map`, and `dense` (all pairs).
- `bounds`: which tiles a pattern leaves visible, from bounds of its function and, where these leave a tile open, from its pairs.
- `tile_lists`: the lists of a pattern, on the host; `call_lists`: those of a call, on the device if arrays hide something;
  `tile_table`: the tiles of ranges and segments, which need no lists.
"""
