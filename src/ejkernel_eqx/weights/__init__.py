"""Published weights: read from files, split and renamed into the layers of this package, strictly."""

from .load import load_published as load_published
from .view import Weights as Weights
