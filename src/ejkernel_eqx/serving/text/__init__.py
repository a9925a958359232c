"""Text of published models: tokens, text as it is generated, stop strings and chat templates. Needs the extra `text`."""

from .chat import ChatTemplate as ChatTemplate
from .chat import ChatTemplateError as ChatTemplateError
from .model import TextModel as TextModel
from .tokenizer import TextStream as TextStream
from .tokenizer import Tokenizer as Tokenizer
