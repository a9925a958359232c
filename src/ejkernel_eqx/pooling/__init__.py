from .mean import MeanPooling as MeanPooling
