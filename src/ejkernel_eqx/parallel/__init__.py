from .partition import Axes as Axes
from .partition import partitioned as partitioned
from .varying import match_varying as match_varying
