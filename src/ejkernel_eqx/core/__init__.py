from .kind import Kind as Kind
from .kind import Named as Named
from .kind import StepKind as StepKind
