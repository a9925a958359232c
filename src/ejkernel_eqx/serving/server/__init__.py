"""An HTTP server of one engine, in OpenAI's form. Needs the extra `server`."""

from .app import make_app as make_app
from .app import run as run
from .worker import Worker as Worker
