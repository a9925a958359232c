from .kind import is_opaque as is_opaque
from .kind import Kind as Kind
from .kind import Named as Named
from .kinds import ForwardKind as ForwardKind
from .kinds import StepKind as StepKind
