from .file import info as info
from .file import load as load
from .file import save as save
