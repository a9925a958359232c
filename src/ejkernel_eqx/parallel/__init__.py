from .opaque import opaque as opaque
from .partition import Axes as Axes
from .partition import match_sharding as match_sharding
from .partition import partitioned as partitioned
from .varying import match_varying as match_varying
