"""An HTTP server for one engine, with OpenAI's interface. It needs the extra `server`."""

from .app import make_app as make_app
from .app import run as run
from .worker import Worker as Worker
