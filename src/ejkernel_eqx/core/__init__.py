from .kind import ForwardKind as ForwardKind
from .kind import is_opaque as is_opaque
from .kind import Kind as Kind
from .kind import Named as Named
from .kind import StepKind as StepKind
