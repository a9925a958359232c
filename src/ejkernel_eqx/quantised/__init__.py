from .dequantise import dequantise as dequantise
from .format import QuantFormat as QuantFormat
from .weight import QuantizedWeight as QuantizedWeight
