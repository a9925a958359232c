from .kernel import CustomKernel as CustomKernel
from .platforms import NoConfig as NoConfig
from .platforms import TritonLauncher as TritonLauncher
