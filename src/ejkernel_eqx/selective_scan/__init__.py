from .state_space_v1 import StateSpaceV1 as StateSpaceV1
