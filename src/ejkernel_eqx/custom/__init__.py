from ..core.platforms import NoConfig as NoConfig
from .kernel import CustomKernel as CustomKernel
from .platforms import TritonLauncher as TritonLauncher
