from .grouped import GroupedMatmul as GroupedMatmul
