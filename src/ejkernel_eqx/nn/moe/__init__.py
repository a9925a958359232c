"""Mixtures of experts: routers, experts, tokens on their way there and back, and what training balances experts by."""

from .layer import MixtureOfExperts as MixtureOfExperts
from .parallel import ExpertParallel as ExpertParallel
from .routing import Routing as Routing
from .statistics import load_balancing_loss as load_balancing_loss
from .statistics import router_jitter as router_jitter
from .statistics import router_z_loss as router_z_loss
from .statistics import RouterStatistics as RouterStatistics
from .statistics import update_correction_bias as update_correction_bias
