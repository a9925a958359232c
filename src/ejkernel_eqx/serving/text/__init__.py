"""Text for published models: tokenizers, streamed text, stop strings and chat templates. It needs the extra `text`."""

from .chat import ChatTemplate as ChatTemplate
from .chat import ChatTemplateError as ChatTemplateError
from .model import TextModel as TextModel
from .tokenizer import ByteTokenizer as ByteTokenizer
from .tokenizer import TextStream as TextStream
from .tokenizer import Tokenizer as Tokenizer
