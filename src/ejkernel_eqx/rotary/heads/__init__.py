from .operation import RotaryHeads as RotaryHeads
